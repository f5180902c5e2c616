"""Fused losses with every combination of features, and their launches on GPUs that need not be
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

from fxpass.kernels import call, chunked, tiled
from fxpass.kernels.call import Operands
from fxpass.spec import expression
from fxpass.spec.operands import Inputs
from fxpass.spec.spec import Spec
from tests.support.driver import Driver, Launched
from tests.support.gpus import A100, H200, MI300, T4, Card

B200 = Card("NVIDIA B200", 10, 0, 180 << 30, 148)
CARDS = {"T4": T4, "A100": A100, "H200": H200, "B200": B200, "MI300X": MI300}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GRADIENTS = ("x", "weight", "bias")

FEATURES = {
    "card": tuple(CARDS),
    "strategy": ("chunked", "tiled"),
    "dtype": (BF16, F16, F32),
    "target": ("indices", "uint8", "every row", "probabilities", "shard", "none"),
    "smoothing": (0.0, 0.1),
    "weighted": (False, True),
    "transform": ("z", "30*tanh(z/30)", "0.5*z"),
    "bias": ("", "narrow", "wide"),
    "run": ("forward", "forward and lse", "gradients", "scaled", "both scales"),
    "sizes": ((130, 64, 4096), (1, 64, 128256), (17, 33, 50257), (300, 8, 1)),
    "layout": ("contiguous", "strided", "misaligned"),
}


def cases(seed: int, count: int):
    """A random but fixed sample of the combinations that exist (of 350,000)."""
    chosen = random.Random(seed)
    made = (
        {name: chosen.choice(values) for name, values in FEATURES.items()}
        for _ in itertools.count()
    )
    return itertools.islice(filter(exists, made), count)


def exists(case) -> bool:
    if case["target"] == "none" and (case["weighted"] or case["smoothing"]):
        return False
    return case["card"] != "T4" or case["dtype"] != BF16 or case["strategy"] == "chunked"


def inputs_of(case) -> Inputs:
    n, d, v = case["sizes"]
    dtype = case["dtype"]

    def matrix(rows, columns, dtype, layout=case["layout"]):
        if layout == "strided":
            return torch.empty(rows, columns + 3, dtype=dtype)[:, :columns]
        if layout == "misaligned":
            return torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
        return torch.empty(rows, columns, dtype=dtype)

    def vector(size, dtype=F32):
        start = int(size != n or case.get("rows") != "new")
        return torch.empty(size + start, dtype=dtype)[start:]

    target = {
        "none": lambda: None,
        "probabilities": lambda: matrix(n, v, F32),
        "uint8": lambda: vector(n, torch.uint8),
    }.get(case["target"], lambda: vector(n, torch.int64))()
    bias = {"": None, "narrow": vector(v, dtype), "wide": vector(v)}[case["bias"]]
    scaled = case["run"] in ("scaled", "both scales")
    saved = case["strategy"] == "tiled"
    new = case.get("rows") == "new"
    return Inputs(
        x=matrix(n, d, dtype, "contiguous" if new else case["layout"]),
        weight=matrix(v, d, dtype),
        bias=bias,
        target=target,
        class_weight=vector(v) if case["weighted"] else None,
        row_scale=vector(n) if scaled else None,
        lse_scale=vector(n) if case["run"] == "both scales" else None,
        lse=vector(n) if saved else None,
        lse_rest=vector(n) if saved else None,
    )


def spec_of(case) -> Spec:
    target = case["target"]
    kind = target if target in ("probabilities", "none") else "indices"
    forward = case["run"].startswith("forward")
    gradients = () if forward else GRADIENTS if case["bias"] else GRADIENTS[:2]
    return Spec(
        reduction="sum",
        target=kind,
        ignore_index=None if target == "every row" else -100,
        label_smoothing=case["smoothing"],
        gradients=gradients,
        lse=case["run"] == "forward and lse",
        shard_of=200000 if target == "shard" else 0,
        strategy=case["strategy"],
        transform=expression.parse(case["transform"]),
    )


def run(case, driver: Driver) -> None:
    """Launches all candidates of all kernels of a case.

    Raises:
        AssertionError: something else was launched than is listed.
    """
    del driver.launched[:]
    spec = spec_of(case)
    with driver.mode:
        inputs = inputs_of(case)
        expected = call.for_call(spec, Operands.of(inputs), driver.gpu)
        if case["strategy"] == "tiled":
            tiled.run(inputs, spec, classes=65536)
        else:
            chunked.run(inputs, spec, rows=4096)
    listed = {
        Launched(c.kernel.name, frozenset(c.items)) for one in expected for c in one.candidates
    }
    launched = set(driver.launched)
    if not driver.tries:
        listed = {Launched(one.name, frozenset(one.options.items())) for one in expected}
    assert launched == listed, f"launched {launched}, listed {listed}"


def rows(case, driver: Driver) -> None:
    """Runs a case as CUDA graphs do: the warm-up leaves ignored rows out, so that its x and targets
    are new tensors; the capture has all rows, wherever they lie.

    Raises:
        AssertionError: the capture compiles a kernel that the warm-up did not load.
    """
    driver.tries = True
    run({**case, "sizes": (40, *case["sizes"][1:]), "rows": "new"}, driver)
    driver.tries = False  # a capture takes the default for sizes that were not timed
    loaded = len(driver.compiled)
    for n in (1, 16, 896, 4099):
        run({**case, "sizes": (n, *case["sizes"][1:])}, driver)
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
