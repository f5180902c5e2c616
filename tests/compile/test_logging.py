"""TORCH_LOGS=+fxpass: one line for every match, rejection and cast; warnings; and the counters."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fxpass import messages

INPUTS = (torch.ones(4, 8), torch.ones(10, 8, requires_grad=True), torch.zeros(4).long())

PROGRAM = """\
import torch
import torch.nn.functional as F

def f(x, w, target):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(F.linear(x, w), target)
    return loss + F.cross_entropy(F.linear(x, w).cumsum(0), target)

inputs = torch.ones(4, 8), torch.ones(10, 8, requires_grad=True), torch.zeros(4).long()
torch.compile(f, backend="fusedce", options={"fusedce.inner": "eager"})(*inputs)
"""


def fused(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def mixture(x, w, target):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(F.linear(x, w), target)
    return loss + F.cross_entropy(F.linear(x, w).cumsum(0), target)


def loss_less(x, w, target):
    return x.tanh().sum() + w.sum()


def with_fusedce(fn, least: float = 1, logits: str = "auto"):
    """``fn``, of which losses of ``least`` MiB of logits are fused."""
    options = {"inner": "eager", "min_logits_mb": least, "logits": logits}
    options = {f"fusedce.{name}": value for name, value in options.items()}
    return torch.compile(fn, backend="fusedce", options=options)


def of_fxpass(caplog, level=logging.DEBUG):
    return [r for r in caplog.records if r.name.startswith("fxpass") and r.levelno >= level]


def logged(caplog, level=logging.DEBUG):
    return [record.getMessage() for record in of_fxpass(caplog, level)]


EXPECTED = [
    "fused: train.py:6 loss = F.cross_entropy(F.linear(x, w), target): logits [4, 10], "
    "cross-entropy: log-probability of the label; gradients of weight in backward",
    "not fused: train.py:7 return loss + F.cross_entropy(F.linear(x, w).cumsum(0), target): "
    "aten.cumsum at train.py:7 works along rows",
]


@pytest.mark.full  # a compile cache of its own
def test_lines_in_a_process_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TORCH_LOGS": "+fxpass"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\w).*fxpass[/\\]\S+\.py:\d+\] (?:\[.*?\] )?(.*)", done.stderr, re.M)
    assert [line for level, line in lines if level == "I"] == EXPECTED


@pytest.mark.parametrize(
    ("fns", "counted"),
    [
        ([fused], (1, 0, 0)),
        ([mixture], (1, 1, 0)),
        ([loss_less], (0, 0, 0)),
        ([fused, mixture], (2, 1, 0)),
    ],
)
def test_counters_add_up(fns, counted):
    for fn in fns:
        with_fusedce(fn, 0)(*INPUTS)
    expected = zip(("matched", "rejected", "casts"), counted, strict=True)
    assert dict(counters["fusedce"]) == dict(expected)


def test_the_lines_are_one_info_record_each(caplog):
    caplog.set_level(logging.INFO, logger="fxpass")
    with_fusedce(mixture, 0)(*INPUTS)
    records = of_fxpass(caplog)
    names = ["fxpass.rewrite.settled"] * 2
    assert [(r.levelname, r.name) for r in records] == [("INFO", name) for name in names]
    kinds = [r.getMessage().split(":")[0] for r in records]
    assert kinds == ["fused", "not fused"]
    assert not any("\n" in r.getMessage() for r in records)


def test_nobody_is_told_who_did_not_ask(caplog):
    with_fusedce(mixture, 0)(*INPUTS)
    assert not of_fxpass(caplog)


def test_switched_off_it_says_so_and_counts_nothing(caplog, monkeypatch):
    monkeypatch.setenv("FUSEDCE", "0")
    caplog.set_level(logging.INFO, logger="fxpass")
    with_fusedce(fused, 0)(*INPUTS)
    assert logged(caplog) == ["switched off: the graph goes to eager unchanged"]
    assert not counters["fusedce"]


# ---------------------------------------------------------------- hidden layers, and heads


class Block(torch.nn.Module):
    """A language model of one block: linears that are no heads, and one that is."""

    def __init__(self, wide=1024, classes=512):
        super().__init__()
        self.query_key_value = torch.nn.Linear(128, 384)
        self.up, self.down = torch.nn.Linear(128, 2 * wide), torch.nn.Linear(wide, 128)
        self.head = torch.nn.Linear(128, classes, bias=False)

    def forward(self, x, labels=None):
        parts = (part.unflatten(-1, (2, -1)) for part in self.query_key_value(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts))
        x = x + mixed.transpose(0, 1).flatten(1)
        gate, up = self.up(x).chunk(2, -1)
        x = x + F.dropout(self.down(F.silu(gate) * up), 0.1)
        logits = 30 * torch.tanh(self.head(x).float() / 30)
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)


HIDDEN, LABELS = torch.ones(1024, 128), torch.zeros(1024).long()  # 2 MiB of logits


@pytest.mark.parametrize("least", [1, 100])
def test_no_line_is_about_a_hidden_layer(caplog, least):
    caplog.set_level(logging.DEBUG, logger="fxpass")
    with_fusedce(Block(), least)(HIDDEN, LABELS)
    (line,) = logged(caplog)
    assert "F.cross_entropy(logits, labels)" in line
    assert line.startswith("fused" if least == 1 else "not fused")


def test_a_small_head_without_a_loss_is_no_news(caplog):
    caplog.set_level(logging.DEBUG, logger="fxpass")
    with torch.no_grad():
        with_fusedce(Block().eval(), 100)(HIDDEN)
    assert not logged(caplog)


def test_a_small_head_that_is_reduced_is_said_at_debug(caplog):
    def surprise(x, w):
        return F.linear(x * 2, w).log_softmax(-1).amax(-1)

    caplog.set_level(logging.DEBUG, logger="fxpass")
    with_fusedce(surprise, 100)(HIDDEN, torch.ones(512, 128))
    (line,) = logged(caplog)
    assert "its logits take 2.0 MiB, fewer than 100 MiB" in line
    assert not logged(caplog, logging.INFO)


# ---------------------------------------------------------------- where the loss is


def test_a_loss_outside_of_the_compiled_model_is_warned_of_once(caplog):
    """Where its logits have to exist."""
    for _ in range(2):
        model = Block(classes=1024)
        F.cross_entropy(with_fusedce(model, logits="keep")(HIDDEN), LABELS).backward()
        torch._dynamo.reset()
    (line,) = logged(caplog, logging.WARNING)
    code, first = inspect.getsourcelines(Block.forward)
    number = first + next(i for i, line in enumerate(code) if "self.head(" in line)
    assert f"tests/compile/test_logging.py:{number} logits = 30 * torch.tanh(self.head(x)" in line
    assert "returns its logits, 4.0 MiB, with gradients, and has no loss of them" in line
    assert messages.fixed(messages.RETURNED) in line


class Layers(torch.nn.Sequential):
    """Linears of these widths with an activation between them."""

    def __init__(self, *widths, last=None):
        pairs = itertools.pairwise(widths)
        layers = [layer for d, v in pairs for layer in (torch.nn.Linear(d, v), torch.nn.GELU())]
        super().__init__(*layers[:-1], *([last] if last else []))


class Parts(torch.nn.Module):
    """A hidden layer whose graph ends early."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x):
        h = self.up(x * 2)
        torch._dynamo.graph_break()
        return self.down(F.gelu(h))


class Checkpointed(Parts):
    """A hidden layer that is all of a checkpoint."""

    def forward(self, x):
        h = checkpoint(lambda x: self.up(x * 2), x, use_reentrant=False)
        return self.down(F.gelu(h))


class Penalty(Parts):
    """Values that are returned beside a loss of them."""

    def forward(self, x):
        h = self.up(x * 2)
        return h.square().mean(), h


class Features(torch.nn.Module):
    """A sparse autoencoder, which returns its hidden values too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 2048), torch.nn.Linear(2048, 128)

    def forward(self, x):
        h = self.up(x * 2)
        return self.down(h), h


WIDE = torch.ones(8192, 128)
HIDDEN_VALUES = {
    "labels": (Block, HIDDEN, LABELS),
    "mlp": (lambda: Layers(128, 4096, 128), HIDDEN),
    "narrow": (lambda: Layers(128, 4096, 512), HIDDEN),
    "activation": (lambda: Layers(128, 64, 512, last=torch.nn.GELU()), HIDDEN),
    "few outputs": (lambda: Layers(128, 64, 200), WIDE),
    "linear": (lambda: torch.nn.Linear(128, 512), HIDDEN),
    "broken": (Parts, HIDDEN),
    "checkpoint": (Checkpointed, HIDDEN),
    "features": (Features, HIDDEN),
    "penalty": (Penalty, HIDDEN),
    "square": (lambda: Layers(128, 512, 512), HIDDEN),
}


@pytest.mark.parametrize("name", HIDDEN_VALUES)
# Dynamo itself looks at the .grad of hidden values that enter a graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_hidden_values_that_are_returned_are_no_logits(caplog, name):
    model, *args = HIDDEN_VALUES[name]
    with_fusedce(model())(*args)
    assert not logged(caplog, logging.WARNING)


def test_logits_without_gradients_or_below_the_threshold_have_no_warning(caplog):
    with torch.no_grad():
        with_fusedce(Block())(HIDDEN)
    with_fusedce(Block(), 100)(HIDDEN)
    assert not logged(caplog, logging.WARNING)


def test_deferred_logits_that_are_computed(caplog):
    """Not by an optimizer's step, nor where they are reduced, and once; the line is the program's."""
    step = with_fusedce(Block())
    for _ in range(2):
        loss, logits = step(HIDDEN, LABELS)
        loss.backward()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
        assert not logged(caplog, logging.WARNING)
        logits.shape, logits[:, :7], logits.float(), logits.argmax(-1)
    logits.sort(0).values.sum()
    logits.sort(0).values.sum()
    (line,) = logged(caplog, logging.WARNING)
    number = test_deferred_logits_that_are_computed.__code__.co_firstlineno + 9
    assert f"test_logging.py:{number} logits.sort(0).values.sum() computes" in line
    assert "which were deferred: sum reads logits of before a step" in line
    assert "float32[1024, 512] of `tests/compile/test_logging.py:" in line
