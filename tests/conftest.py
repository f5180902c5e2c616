"""What every test gets: a clean compiler, uninitialised memory that shows, one device."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Compile caches of this run alone: what another revision of the operator left must not be tested.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxpass-tests-")
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
# Nothing is downloaded, and no telemetry sent (TRL would).
os.environ["HF_HUB_OFFLINE"] = "1"
# Inductor compiles two programs to try the vector units with, eight seconds in each new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# cuBLAS wants this before it is deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

# Without a GPU the kernels run in Triton's interpreter, which has to be chosen before triton is
# imported and then holds for the process. (Compiling them for GPUs has a process of its own.)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the processors

import pytest
import torch.distributed as dist
from torch._dynamo.utils import counters

from fxpass.casts import casts
from fxpass.graph import source
from fxpass.plan import plan
from tests.support.durations import Durations
from tests.support.gpus import H200, Gpus

for variable in [v for v in os.environ if v.startswith("FUSEDCE")]:
    del os.environ[variable]  # a setting of the caller's shell must not decide what is tested
os.environ["FUSEDCE_MIN_LOGITS_MB"] = "0"  # the models of tests are tiny

QUICK = "not full"  # as in pyproject.toml


# What only `pytest -m ""` runs, relative to this folder.
FULL = (
    "libraries",
    "ranks",
    # programs that run for a minute
    "benchmarks/test_bytes.py",
    "benchmarks/test_coverage.py",
    "benchmarks/test_loss.py",
    "benchmarks/test_training.py",
    "compile/test_fuzz.py",
    "compile/test_memory.py",
    "compile/test_opinfo.py",
    "compile/test_scaler.py",
    "programs/rows/of_liger.py",
    "programs/rows/of_peft.py",
    "programs/rows/of_torchmetrics.py",
    "programs/rows/of_transformers.py",
    "programs/rows/of_trl.py",
    "unit/cli/test_demo.py",
    "unit/kernels/test_compile.py",
    "unit/kernels/test_compile_reductions.py",
)
# What modules need beside torch, triton, numpy, pytest and expecttest.
NEEDS = {
    "benchmarks/test_coverage.py": ("transformers",),
    "compile/test_models.py": ("transformers",),
    "compile/test_where_the_loss_is.py": ("transformers",),
    "defaults/test_models.py": ("transformers",),
    "programs/rows/of_liger.py": ("liger_kernel",),
    "programs/rows/of_peft.py": ("peft",),
    "programs/rows/of_torchmetrics.py": ("torchmetrics",),
    "programs/rows/of_transformers.py": ("transformers",),
    "programs/rows/of_trl.py": ("trl",),
    "ranks/test_four.py": ("transformers",),
    "ranks/test_fuzz.py": ("transformers",),
    "ranks/test_two.py": ("transformers",),
    "unit/deferred/test_handed_on.py": ("transformers",),
    "libraries/test_accuracy_liger.py": ("liger_kernel",),
    "libraries/test_contrib.py": ("accelerate", "datasets"),
    "libraries/test_deepspeed.py": ("deepspeed",),
    "libraries/test_device_maps.py": ("accelerate",),
    "libraries/test_lightning.py": ("lightning",),
    "libraries/test_lightning_encoder.py": ("lightning",),
    "libraries/test_grpo.py": ("trl",),
    "libraries/test_liger.py": ("accelerate", "datasets", "liger_kernel"),
    "libraries/test_llama_recipes.py": ("accelerate", "peft"),
    "libraries/test_outside.py": ("accelerate", "datasets", "lightning", "trl"),
    "libraries/test_peft.py": ("accelerate", "liger_kernel", "peft"),
    "libraries/test_trainers.py": ("accelerate", "datasets"),
    "libraries/test_trl.py": ("accelerate", "datasets", "trl"),
}
HERE = Path(__file__).parent


def name_of(path: Path) -> str:
    """Relative to this folder, with slashes."""
    return path.relative_to(HERE).as_posix()


def is_full(name: str) -> bool:
    return name in FULL or name.partition("/")[0] in FULL


def pytest_ignore_collect(collection_path, config):
    """The quick tier does not even import the modules of the other one. Without ``-m`` everything
    that is needed has to be there; with another ``-m``, modules that need more are left out."""
    name = name_of(collection_path)
    if config.option.markexpr == QUICK:
        return True if name in NEEDS and is_full(name) else None
    missing = [need for need in NEEDS.get(name, ()) if importlib.util.find_spec(need) is None]
    if missing and not config.option.markexpr:
        raise pytest.UsageError(f"{name} needs {', '.join(missing)}: pip install '.[test-all]'")
    return True if missing else None


# ---------------------------------------------------------------- the schedule


def pytest_addoption(parser):
    what = "fail where a test takes longer than its tier allows (tests/support/durations.py)"
    parser.addoption("--limit-durations", action="store_true", help=what)


def pytest_configure(config):
    if config.getoption("limit_durations", False):
        config.pluginmanager.register(Durations())
    # pytest-xdist would begin with the files of the most tests. In order, what runs whole programs
    # (benchmarks, compile, libraries, ranks) comes before the units, and no long file is the last.
    config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """A worker takes a gigabyte."""
    return min(4, os.cpu_count() or 1)


# ---------------------------------------------------------------- tests of kernels


def launches(item: pytest.Item) -> bool:
    """Whether a test gets a device to run kernels on: a GPU, or a CPU through the interpreter."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    given = "device" in item.fixturenames and "device" not in parameters
    return given and parameters.get("implementation") != "aten"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks what ``FULL`` names, and what launches kernels. Tests marked ``only_gpu`` are for
    machines that have a GPU, ``only_gpus`` for those that have two."""
    needed = {"only_gpu": 1, "only_gpus": 2}
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    without = []
    for item in items:
        if is_full(name_of(item.path)):
            item.add_marker("full")
        gpus = max(needed.get(marker.name, 0) for marker in [*item.iter_markers(), pytest.mark.gpu])
        if gpus or launches(item):
            item.add_marker("gpu")
        if gpus > there:
            without.append(item)
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


launched: list[object] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter

        run_grid = interpreter.GridExecutor.__call__

        def taken_down(self, *args, **kwargs):
            launched.append(self.fn)
            return run_grid(self, *args, **kwargs)

        interpreter.GridExecutor.__call__ = taken_down


@pytest.fixture(autouse=True)
def _launches_are_marked(request):
    """``-m gpu`` has every test that launches a kernel, but for the fuzzer's, which are full."""
    launched.clear()
    yield
    marked = any(request.node.get_closest_marker(name) for name in ("gpu", "full"))
    assert marked or not launched, "this test launches kernels: it wants the fixture device"


# ---------------------------------------------------------------- fixtures


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU if there is one, else the CPU (through the interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gpus(monkeypatch):
    """GPUs that torch says it has: ``gpus.have(H200, T4)``."""
    made = Gpus(monkeypatch)
    yield made
    made.forget()


@pytest.fixture
def h200(gpus):
    """One H200, as the driver describes it."""
    gpus.have(H200)


@pytest.fixture(params=["aten", "triton"])
def implementation(request, device, monkeypatch):
    """Each implementation in turn, on tensors of a device that it runs on (Triton's interpreter: any)."""
    if request.param == "triton" and device.type == "cpu":
        other = ("triton", "for the test")
        wide = ("aten", "the Triton kernels compute in f32")
        monkeypatch.setattr(
            plan, "implementation_for", lambda _, dtype: wide if dtype == torch.float64 else other
        )
    with device if request.param == "triton" else torch.device("cpu"):
        yield request.param


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """The name of a process group of this process."""
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _clean_compiler():
    """No compiled code, counters, log or random state from another test; torch.empty holds nan."""
    torch._dynamo.reset()
    counters.clear()
    casts.logged.clear()
    source.warned.clear()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
