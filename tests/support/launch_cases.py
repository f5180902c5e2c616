"""Class reductions with combinations of features, and their launches on GPUs that need not be
there. Run by ``test_every_launch.py`` in a process of its own.

    python -m tests.support.launch_cases launches SEED COUNT
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxpass.formula.operands import Operands, empty_outputs
from fxpass.formula.outputs import OF_PICKS, TRAINED, line_count
from fxpass.formula.reductions import Reductions
from fxpass.kernels import call, reductions
from fxpass.plan.plan import Plan
from tests.support.driver import Driver, Launched
from tests.support.gpus import A100, H200, MI300, T4, Card
from tests.support.specs import spec_of

B200 = Card("NVIDIA B200", 10, 0, 180 << 30, 148)
CARDS = {"T4": T4, "A100": A100, "H200": H200, "B200": B200, "MI300X": MI300}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

FEATURES = {
    "card": tuple(CARDS),
    "dtype": (BF16, F16, F32),
    "outputs": (
        *("pick", "argmax;moment(1,1);pick", "argmax;lse;max", "at;lse;pick", "at"),
        *("moment(0,1,1);moment(1,2)", "moment(0,2);moment(2,2,0)"),
    ),
    "transform": ("z", "30*tanh(z/30)", "0.5*z"),
    "bias": ("", "narrow", "wide"),
    "scaled": (False, True),
    "picks": (0, 1, 3),  # 0: a vector [N]
    "run": ("forward", "backward", "backward", "total", "evaluation"),
    "classes": (256, 65536),  # of a slice
    "sizes": (
        *((130, 64, 4096), (1, 64, 128256), (17, 33, 50257), (300, 8, 1), (20, 8, 257)),
        (1 << 20, 8, 2),
    ),
    "layout": ("contiguous", "strided", "misaligned"),
}


def cases(seed: int, count: int):
    """A random but fixed sample of the combinations (of 500,000)."""
    chosen = random.Random(seed)
    made = (
        {name: chosen.choice(values) for name, values in FEATURES.items()}
        for _ in itertools.count()
    )
    return itertools.islice(made, count)


def made(case) -> Reductions:
    gradients = "x,weight" + ",bias" * bool(case["bias"])
    transform = f"transform={case['transform']} " * (case["transform"] != "z")
    outputs, words = case["outputs"], case["outputs"].split(";")
    total = ";".join(w for w in words if "(" in w or w in TRAINED)
    if case["run"] == "total":
        text = f"outputs=argmax;lse {transform}gradients={gradients} total={total}"
    elif case["run"] == "evaluation":
        text = f"outputs={outputs} {transform}".strip()
    else:
        text = f"outputs={outputs} {transform}gradients={gradients}"
        text += " detached=max" * ("max" in words)
    return spec_of(text)


def operands_of(case, spec: Reductions) -> Operands:
    n, d, v = case["sizes"]
    dtype = case["dtype"]
    new = case.get("rows") == "new"

    def matrix(rows, columns, layout=case["layout"]):
        if layout == "strided":
            return torch.empty(rows, columns + 3, dtype=dtype)[:, :columns]
        if layout == "misaligned":
            return torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
        return torch.empty(rows, columns, dtype=dtype)

    def of_rows(*shape, dtype=F32):
        start = int(not new)
        return torch.empty(shape[0] + start, *shape[1:], dtype=dtype)[start:]

    bias = {"": None, "narrow": torch.empty(v, dtype=dtype), "wide": torch.empty(v)}[case["bias"]]
    k = case["picks"]
    picks = of_rows(*((n, k) if k else (n,)), dtype=torch.int64)
    lines = sum(max(1, k) if output in OF_PICKS else 1 for output in spec.total)
    return Operands(
        x=torch.empty(n, d, dtype=dtype) if new else matrix(n, d),
        weight=matrix(v, d),
        bias=bias,
        scale=of_rows(n) if case["scaled"] else None,
        picks=picks if spec.reads_picks else None,
        given=(torch.empty(v), matrix(n, v)),
        coef=torch.empty(lines, n) if spec.total else None,
    )


def run(case, driver: Driver) -> None:
    """Launches the kernel of a case.

    Raises:
        AssertionError: something else was launched than is listed.
    """
    del driver.launched[:]
    spec, forward = made(case), case["run"] != "backward"
    n, _, v = case["sizes"]
    plan = Plan("triton", "chunked" if forward else "tiled", rows=4096, classes=case["classes"])
    with driver.mode:
        operands = operands_of(case, spec)
        trained = spec if forward else spec.of_backward
        (launch,) = call.for_reductions(trained, operands, driver.gpu, forward)
        if forward:
            reductions.forward(operands, spec, plan)
        else:
            out = empty_outputs(operands, spec)
            lines = sum(line_count(output, operands.pick_count) for output in spec.of_backward.rows)
            incoming = torch.empty(lines, n)
            reductions.backward(operands, spec.of_backward, plan, out, incoming)
    parts = -(-n // 4096) if forward else -(-v // case["classes"])
    assert driver.launched == [Launched(launch.name, frozenset(launch.items))] * parts


def rows(case, driver: Driver) -> None:
    """Runs a case as CUDA graphs do: the warm-up leaves rows out, so that its operands are new
    tensors; the capture has all rows, wherever they lie, and slices of other sizes.

    Raises:
        AssertionError: the capture compiles a kernel that the warm-up did not load.
    """
    _, d, v = case["sizes"]
    run({**case, "sizes": (40, d, v), "classes": 1 << 17, "rows": "new"}, driver)
    loaded = len(driver.compiled)
    for n in (1, 16, 896, 4099):
        run({**case, "sizes": (n, d, v)}, driver)
        new = driver.compiled[loaded:]
        assert not new, f"for {n} rows {new}"


def report(check: Callable[[dict[str, Any], Driver], None], cases: Iterable) -> None:
    """Checks each case on its GPU, and prints what was found as JSON."""
    failures, launches, compiled = [], 0, 0
    by_card = sorted(cases, key=lambda case: list(CARDS).index(case["card"]))
    for card, of_card in itertools.groupby(by_card, key=lambda case: case["card"]):
        with Driver(CARDS[card], hip="7.0" if card == "MI300X" else None) as driver:
            for case in of_card:
                try:
                    check(case, driver)
                except Exception:
                    failures.append(f"{case}\n{traceback.format_exc(limit=-6)}")
                launches += len(driver.launched)
            compiled += len(driver.compiled)
    print(json.dumps({"failures": failures, "launches": launches, "compiled": compiled}))


if __name__ == "__main__":
    what, seed, count = sys.argv[1], *map(int, sys.argv[2:])
    report({"launches": run, "rows": rows}[what], cases(seed, count))
