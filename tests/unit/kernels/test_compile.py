"""Kernels taken to machine code for GPUs that need not be there: fingerprints; what is compared.

Those of reductions are in ``test_compile_reductions.py``.
"""

import re
from pathlib import Path

import pytest
import torch

from fxpass.kernels import fingerprint, scale
from fxpass.kernels.call import Candidate
from fxpass.kernels.render import reductions
from fxpass.spec.reductions import Reductions
from tests.support.compiled import TARGETS, Resources, Unit, _read, _write, compare, resources
from tests.unit.kernels.test_compile_reductions import GOLDEN, unit

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
    given = dict(zip(names, taken["args"], strict=True))
    types = {torch.uint8: "*u8"}
    signature = {
        name: ("i32" if abs(v) < 2**31 else "i64")
        if isinstance(v, int)
        else types.get(v.dtype, f"*i{8 * v.element_size()}")
        for name, v in given.items()
    }
    ones = {name: 1 for name, v in given.items() if isinstance(v, int) and v == 1}
    sizes = {name: taken["options"].pop(name) for name in ("BLOCK", "SUMS")}
    aligned = [n for n, v in given.items() if isinstance(v, int) and v % 16 == 0]
    aligned += ["factors", "out", *["bits"] * bits.is_contiguous()]
    constants = {**ones, **sizes}
    name = "weighted_sums"
    return Unit(source, name, signature, constants, taken["options"], tuple(aligned))


@pytest.mark.parametrize("target", TARGETS)
def test_fingerprints_compile_and_nothing_spills(target, monkeypatch):
    units = {label: fingerprint_unit(bits, monkeypatch) for label, bits in TENSORS.items()}
    assert "i64" not in units["words"].signature.values()
    found = resources(units, target)

    assert not any(one.spills for one in found.values()), found


# ---------------------------------------------------------------- the loss's incoming gradient


@pytest.mark.parametrize("target", TARGETS)
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
    assert not any(one.spills for one in found.values()), found


# ---------------------------------------------------------------- the table can fail


def test_a_spill_is_found():
    """A hundred and more values in each of 32 threads, all of which are needed to the end."""
    kernel = reductions(Reductions((), gradients=("x",), total=("pick",)), whole_row=True)
    large = Candidate(kernel, (("BLOCK_V", 1 << 13), ("num_warps", 1)))
    found = resources({"large": unit(large, "fp32", 1, True)}, "sm_80")
    assert found["large"].spills
    with pytest.raises(AssertionError, match="sm_80 spills"):
        compare(GOLDEN, "sm_80", found)


def test_what_does_not_compile_says_why():
    wrong = Unit("import triton\n\n@triton.jit\ndef f(x):\n    x + nothing\n", "f", {"x": "i32"})
    with pytest.raises(AssertionError, match="nothing is not defined"):
        resources({"wrong": wrong}, "sm_80")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Resources(33, 0, 64), "is old"),
        (Resources(32, 0, 16), "is old"),
        (Resources(32, 4, 64), "spills"),
        (Resources(32, 0, 1 << 20), "of shared memory"),
    ],
)
def test_compare(tmp_path, monkeypatch, found, message):
    path = tmp_path / "table.md"
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    compare(path, "sm_90", {"a": Resources(32, 0, 64), "b": Resources(1, 0, 0)})
    compare(path, "gfx942", {"a": Resources(40, 0, 16)})
    assert path.read_text().splitlines()[3:] == [
        "| kernel | sm_90 | gfx942 |",
        "| --- | --- | --- |",
        "| a | 32, 64 B | 40, 16 B |",
        "| b | 1, 0 B |  |",
    ]
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    compare(path, "sm_90", {"a": Resources(32, 0, 64), "b": Resources(1, 0, 0)})
    with pytest.raises(AssertionError, match=message):
        compare(path, "sm_90", {"a": found, "b": Resources(1, 0, 0)})
    with pytest.raises(AssertionError, match="is old"):
        compare(path, "sm_90", {"a": Resources(32, 0, 64)})


def test_numbers_of_another_triton_are_not_compared(tmp_path):
    path = tmp_path / "table.md"
    path.write_text(_write("1.0", {"sm_90": {"a": "32, 64 B"}}))
    assert _read(path.read_text()) == ("1.0", {"sm_90": {"a": "32, 64 B"}})
    compare(path, "sm_90", {"a": Resources(33, 0, 64)})
    with pytest.raises(AssertionError, match="spills"):
        compare(path, "sm_90", {"a": Resources(33, 8, 64)})
