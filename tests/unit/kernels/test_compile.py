"""Kernels taken to machine code for GPUs that need not be there: fingerprints, products with a factor.

Those of reductions are in ``test_compile_reductions.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxpass.formula.reductions import Reductions
from fxpass.kernels import fingerprint, scale
from fxpass.kernels.call import Gpu, Launch
from fxpass.kernels.render import Features, reductions_kernel
from tests.support.compiled import Resources, Unit, assert_fits, resources
from tests.unit.kernels.test_compile_reductions import unit

# ---------------------------------------------------------------- fingerprints

TENSORS = {
    "words": torch.empty((4096, 256), dtype=torch.int64, device="meta"),
    "16 bits": torch.empty((4096, 1001), dtype=torch.int16, device="meta")[:, 1:],
    "8 bits": torch.empty((8, 64, 5000), dtype=torch.uint8, device="meta")[:, 1:, ::2],
    "beyond 2**31": torch.empty((2**24, 300), dtype=torch.int32, device="meta")[:, ::3],
}


def fingerprint_unit(bits, patch):
    """The launch for these integers, as Triton's binder specialises it."""
    taken = {}

    class Taken:
        def __getitem__(self, grid):
            return lambda *args, **options: taken.update(args=args, options=options)

    patch.setattr(fingerprint, "weighted_sums", Taken())
    in_block = 2048 // bits.element_size()
    fingerprint.sums(bits, torch.empty((2, in_block), dtype=torch.int64, device="meta"))
    patch.undo()
    source = Path(fingerprint.__file__).read_text()
    names = re.findall(
        r"^    (\w+),$", source.partition("def weighted_sums(")[2].partition(":")[0], re.M
    )
    options = taken["options"]
    given = dict(zip(names, taken["args"], strict=False))
    given |= {name: options.pop(name) for name in names if name in options}
    assert [*given] == names
    types = {torch.uint8: "*u8"}
    signature = {
        name: ("i32" if abs(v) < 2**31 else "i64")
        if isinstance(v, int)
        else types.get(v.dtype, f"*i{8 * v.element_size()}")
        for name, v in given.items()
    }
    ones = {name: 1 for name, v in given.items() if isinstance(v, int) and v == 1}
    sizes = {name: options.pop(name) for name in ("BLOCK", "SUMS")}
    aligned = [n for n, v in given.items() if isinstance(v, int) and v % 16 == 0]
    aligned += ["factors", "out", *["bits"] * bits.is_contiguous()]
    constants = {**ones, **sizes}
    name = "weighted_sums"
    return Unit(source, name, signature, constants, options, tuple(aligned))


def test_fingerprints_compile_and_nothing_spills(target, monkeypatch):
    units = {label: fingerprint_unit(bits, monkeypatch) for label, bits in TENSORS.items()}
    assert "i64" not in units["words"].signature.values()
    found = resources(units, target)

    assert_fits(found, units, target)


# ---------------------------------------------------------------- the loss's incoming gradient


def test_the_product_with_a_factor_compiles_and_nothing_spills(target):
    """In place, for gradients of fewer and of more than 2**31 elements."""
    source = Path(scale.__file__).read_text()
    units = {
        f"{dtype} {count}": Unit(
            *(source, "kernel", {"gradient": f"*{dtype}", "factor": "*fp32", "count": count}),
            *(
                {"BLOCK": scale.BLOCK, "BLOCKS": scale.BLOCKS},
                {"num_warps": 8},
                ("gradient", "factor"),
            ),
        )
        for dtype in ("bf16", "fp16", "fp32")
        for count in ("i32", "i64")
    }
    found = resources(units, target)
    assert_fits(found, units, target)


# ---------------------------------------------------------------- the test can fail


def test_a_spill_is_found():
    """A hundred and more values in each of 32 threads, all of which are needed to the end."""
    kernel = reductions_kernel(
        Reductions((), gradients=("x",), total=("pick",)), features=Features(whole_row=True)
    )
    large = Launch(Gpu("", ""), kernel, (("BLOCK_V", 1 << 13), ("num_warps", 1)))
    units = {"large": unit(large, "fp32", 1, True)}
    found = resources(units, "sm_80")
    assert found["large"].spills
    for wrong, message in (
        (found["large"], "spills"),
        (Resources(200, 0, 0), "registers"),
        (Resources(32, 0, 1 << 20), "shared memory"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_fits({"large": wrong}, units, "sm_80")


def test_what_does_not_compile_says_why():
    wrong = Unit("import triton\n\n@triton.jit\ndef f(x):\n    x + nothing\n", "f", {"x": "i32"})
    with pytest.raises(AssertionError, match="nothing is not defined"):
        resources({"wrong": wrong}, "sm_80")
