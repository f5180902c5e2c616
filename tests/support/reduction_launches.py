"""Class reductions with combinations of features, and their launches on GPUs that need not be
there. Run by ``test_every_launch.py`` in a process of its own.

    python -m tests.support.reduction_launches launches SEED COUNT
"""

from __future__ import annotations

import itertools
import random
import sys

import torch

from fxpass.kernels import call, reductions
from fxpass.kernels.call import OfReductions
from fxpass.plan.plan import Plan
from fxpass.spec.reduction_operands import Operands, Outputs, empty
from fxpass.spec.reductions import REVISION, Reductions
from tests.support.driver import Driver, Launched
from tests.support.launch_cases import BF16, CARDS, F16, F32, report

FEATURES = {
    "card": tuple(CARDS),
    "dtype": (BF16, F16, F32),
    "outputs": (
        *("pick", "argmax;moment(1,1);pick", "amax;argmax;lse;max;peak", "at;lse;pick"),
        *("logits(0);moment(0,1,1);moment(1,2)", "logits;moment(0,2);moment(2,2,0)"),
    ),
    "transform": ("z", "30*tanh(z/30)", "0.5*z"),
    "bias": ("", "narrow", "wide"),
    "scaled": (False, True),
    "picks": (0, 1, 3),  # 0: a vector [N]
    "run": ("forward", "backward", "total"),
    "sizes": ((130, 64, 4096), (1, 64, 128256), (17, 33, 50257), (300, 8, 1)),
    "layout": ("contiguous", "strided", "misaligned"),
}
IN_TOTAL = ("lse", "pick", "at")


def cases(seed: int, count: int):
    """A random but fixed sample of the combinations."""
    chosen = random.Random(seed)
    made = (
        {name: chosen.choice(values) for name, values in FEATURES.items()}
        for _ in itertools.count()
    )
    return itertools.islice(made, count)


def spec_of(case) -> Reductions:
    gradients = "x,weight" + ",bias" * bool(case["bias"])
    transform = f"transform={case['transform']} " * (case["transform"] != "z")
    outputs = case["outputs"].replace("logits;", "logits();")
    if case["run"] == "total":
        words = outputs.split(";")
        total = ";".join(w for w in words if "(" in w or w in IN_TOTAL)
        return Reductions.parse(
            f"{REVISION} outputs=argmax;lse {transform}gradients={gradients} total={total}"
        )
    gradients += ",scale" * case["scaled"]
    return Reductions.parse(f"{REVISION} outputs={outputs} {transform}gradients={gradients}")


def operands_of(case, spec: Reductions) -> Operands:
    n, d, v = case["sizes"]
    dtype = case["dtype"]
    new = case.get("rows") == "new"

    def matrix(rows, columns, dtype=dtype):
        if case["layout"] == "strided":
            return torch.empty(rows, columns + 3, dtype=dtype)[:, :columns]
        if case["layout"] == "misaligned":
            return torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
        return torch.empty(rows, columns, dtype=dtype)

    def of_rows(*shape, dtype=F32):
        start = int(not new)
        return torch.empty(shape[0] + start, *shape[1:], dtype=dtype)[start:]

    bias = {"": None, "narrow": torch.empty(v, dtype=dtype), "wide": torch.empty(v)}[case["bias"]]
    k = case["picks"]
    picks = of_rows(*((n, k) if k else (n,)), dtype=torch.int64)
    read = {*spec.outputs, *spec.total}
    lines = sum(max(1, k) if output in ("pick", "at") else 1 for output in spec.total)
    return Operands(
        x=torch.empty(n, d, dtype=dtype) if new else matrix(n, d),
        weight=matrix(v, d),
        bias=bias,
        scale=of_rows(n) if case["scaled"] else None,
        picks=picks if not read.isdisjoint(("pick", "at")) else None,
        given=(torch.empty(v), matrix(n, v)),
        coef=torch.empty(lines, n) if spec.total else None,
    )


def run(case, driver: Driver) -> None:
    """Launches all candidates of the kernel of a case.

    Raises:
        AssertionError: something else was launched than is listed.
    """
    del driver.launched[:]
    spec, forward = spec_of(case), case["run"] != "backward"
    v = case["sizes"][2]
    plan = Plan("triton", "chunked", rows=4096, classes=v)
    with driver.mode:
        operands = operands_of(case, spec)
        (launch,) = call.for_reductions(spec, OfReductions.of(operands), driver.gpu, forward)
        if forward:
            out, _ = reductions.forward(operands, spec, plan)
            assert isinstance(out, Outputs)
        else:
            out = empty(operands, spec)
            reductions.backward(operands, spec, plan, out, torch.empty_like(out.rows))
    listed = {Launched(c.kernel.name, frozenset(c.items)) for c in launch.candidates}
    launched = set(driver.launched)
    if not driver.tries:
        listed = {Launched(launch.name, frozenset(launch.options.items()))}
    assert launched == listed, f"launched {launched}, listed {listed}"


def rows(case, driver: Driver) -> None:
    """Runs a case as CUDA graphs do, see :func:`tests.support.launch_cases.rows`.

    Raises:
        AssertionError: the capture compiles a kernel that the warm-up did not load.
    """
    driver.tries = True
    run({**case, "sizes": (40, *case["sizes"][1:]), "rows": "new"}, driver)
    driver.tries = False
    loaded = len(driver.compiled)
    for n in (1, 16, 896, 4099):
        run({**case, "sizes": (n, *case["sizes"][1:])}, driver)
        new = driver.compiled[loaded:]
        assert not new, f"for {n} rows {new}"


if __name__ == "__main__":
    what, seed, count = sys.argv[1], *map(int, sys.argv[2:])
    report({"launches": run, "rows": rows}[what], cases(seed, count))
