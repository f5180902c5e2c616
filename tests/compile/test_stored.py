"""Compiled code that torch stores, in processes that load it: ``aot_compile``, precompiling."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.precompile_context import PrecompileContext
from torch._dynamo.utils import counters

import fxpass

# What a user's file has: a loss, and a model that returns its logits too.
TRAIN = """\
import sys
import torch
import torch.nn.functional as F

torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x, y):
        z = self.head(x)
        return F.cross_entropy(z, y), z

def logits(x, w, y):
    z = F.linear(x, w)
    return F.cross_entropy(z, y), z

def loss(x, w, y):
    return (F.cross_entropy(F.linear(x, w), y),)

def probe(x, w, y):  # backward reads a copy of the weight
    return (F.cross_entropy(F.linear(x.detach(), w), y, reduction="none"),)

programs = {program.__name__: program for program in (logits, loss, probe)}
x, w = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
y = torch.randint(10, (6,))
model = Model()

def check(compiled, program, *inputs):
    got, want = compiled(*inputs), program(*inputs)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        torch.testing.assert_close(a.detach().clone(), b.detach())
    for a, b in zip(gradients(got[0]), gradients(want[0]), strict=True):
        torch.testing.assert_close(a, b)

def gradients(loss):
    return torch.autograd.grad(loss.sum(), (x, w), allow_unused=True, materialize_grads=True)
"""

# The second process reads what the first one stored, and need not ask for the same backend.
PRECOMPILED = (
    TRAIN
    + """
backend, order, file = sys.argv[1:]
if order == "load":
    torch.compiler.load_cache_artifacts(open(file, "rb").read())
for program in programs.values():
    check(torch.compile(program, backend=backend), program, x, w, y)
check(torch.compile(model, backend=backend), model, x, y)
if order == "save":
    stored, _ = torch.compiler.save_cache_artifacts()
    open(file, "wb").write(stored)
print(torch._dynamo.utils.counters["dynamo_cache"]["dynamo_cache_hit"])
print(torch._dynamo.utils.counters["fusedce"]["matched"])
"""
)

AHEAD = (
    TRAIN
    + """
torch.use_deterministic_algorithms(True)  # as in the process that compiled
for name in sys.argv[1:]:
    program = programs[name.split("-")[1]]
    with open(name, "rb") as file:
        compiled = torch.compiler.load_compiled_function(file)
    check(compiled, program, x, w, y)
"""
)


def logits(x, w, y):
    z = F.linear(x, w)
    return F.cross_entropy(z, y), z


def loss(x, w, y):
    return (F.cross_entropy(F.linear(x, w), y),)


def probe(x, w, y):
    return (F.cross_entropy(F.linear(x.detach(), w), y, reduction="none"),)


def inputs():
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    return x, w, torch.randint(10, (6,))


def python(folder: Path, code: str, *arguments: str, **env: str) -> list[str]:
    """The words that a file with ``code`` prints in a process of its own."""
    (folder / "train.py").write_text(code)
    environ = {**os.environ, **env}
    environ.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.full  # compile caches of its own
def test_precompiled_code_is_right_in_every_later_process(tmp_path):
    """Dynamo's key has no backend: Inductor too runs the fused code that it finds."""
    env = {"TORCH_CACHING_PRECOMPILE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    file = str(tmp_path / "artifacts")

    def run(backend: str, order: str, folder: str = "first", **more: str) -> list[str]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        return python(tmp_path, PRECOMPILED, backend, order, file, **env, **cache, **more)

    assert run("fusedce", "save") == ["0", "2"]
    assert run("fusedce", "no")[1] == "0"
    hits, _ = run("inductor", "no")
    assert int(hits) > 0
    assert run("fusedce", "no", FUSEDCE="0") == [hits, "0"]
    assert run("fusedce", "load", "second") == [hits, "0"]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.skipif(torch.__version__ < "2.12", reason="off by default, and for Inductor only")
def test_a_function_compiled_ahead_of_time(tmp_path, inner):
    names = []
    for program in (logits, loss, probe):
        options = {"fusedce.inner": inner}
        made = torch.compile(program, backend="fusedce", options=options, fullgraph=True)
        compiled = made.aot_compile((inputs(), {}))
        assert type(compiled(*inputs())[-1]) is torch.Tensor
        name = f"{inner}-{program.__name__}"
        compiled.save_compiled_function(str(tmp_path / name))
        names.append(name)
    assert counters["fusedce"]["matched"] == 2  # of returned logits, the loss is computed
    # torch guards on the number of threads, which differs between workers and other processes
    same = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    python(tmp_path, AHEAD, *names, **same)


@pytest.mark.parametrize("mode", ["defer", "drop"])
@torch._dynamo.config.patch(caching_precompile=True)
def test_logits_that_cannot_be_deferred_are_kept_and_the_log_says_so(mode, caplog):
    options = {"fusedce.inner": "eager", "fusedce.logits": mode}
    _, z = torch.compile(logits, backend="fusedce", options=options)(*inputs())
    assert type(z) is torch.Tensor
    assert not counters["fusedce"]["matched"]
    assert f"FUSEDCE_LOGITS={mode} has no effect where torch stores compiled code" in caplog.text


@torch._dynamo.config.patch(caching_precompile=True)
def test_explain_shows_what_is_stored_and_stores_nothing():
    PrecompileContext.clear()
    report = fxpass.explain(logits, *inputs())
    assert "leave" in report.rejections[0].reason
    assert not PrecompileContext._dynamo_cache_entries
