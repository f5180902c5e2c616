"""Generated kernels taken to machine code for GPUs that need not be there, and what they take.

Read from the compiled kernels and kept in ``compiled_rows.md``, at the default launch options.
"""

import re
from pathlib import Path

import pytest
import torch

from fxpass.kernels import fingerprint
from fxpass.kernels.render import row
from fxpass.kernels.row_config import row_candidates, row_options
from fxpass.spec.spec import Spec
from tests.support.compiled import TARGETS, Resources, Unit, _read, _write, compare, resources

GOLDEN = Path(__file__).parent / "compiled_rows.md"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = {
    "target": "*i64",
    "class_weight": "*fp32",
    "row_scale": "*fp32",
    "lse_scale": "*fp32",
    "loss": "*fp32",
    "lse": "*fp32",
    "stride": "i32",
    "target_stride": "i32",
    "V": "i32",
}
ALIGNED = ("logits", "class_weight", "stride", "target_stride", "V")
CLASSES, FEW_CLASSES, ODD_CLASSES = 128256, 4096, 50257
SOME_CLASSES = 16032  # one block may have a whole row

PLAIN = "gradients=x"
SOFTCAP = "transform=30*tanh(z/30) gradients=x"
EVERYTHING = f"ignore_index=-1 label_smoothing=0.1 {SOFTCAP}"
PROBABILITIES = "target=probabilities label_smoothing=0.1 gradients=x"
SHARD = f"label_smoothing=0.1 gradients=x shard_of={CLASSES}"
# label: spec, class weights, scales of loss and lse, classes, dtypes of the logits
KERNELS = {
    "forward": ("", False, (), CLASSES, ("bf16",)),
    "plain": (PLAIN, False, (), CLASSES, ("bf16", "fp16", "fp32")),
    "plain, whole rows": (PLAIN, False, (), FEW_CLASSES, ("bf16", "fp32")),
    "plain, odd classes": (PLAIN, False, (), ODD_CLASSES, ("bf16",)),
    "soft-cap": (SOFTCAP, False, (), CLASSES, ("bf16", "fp32")),
    "plain, some classes": (PLAIN, False, (), SOME_CLASSES, ("bf16",)),
    "soft-cap, some classes": (SOFTCAP, False, (), SOME_CLASSES, ("bf16",)),
    "probabilities, some classes": (PROBABILITIES, True, (), SOME_CLASSES, ("bf16",)),
    "everything, some classes": (EVERYTHING, True, (True,), SOME_CLASSES, ("fp16",)),
    "everything": (EVERYTHING, True, (True,), CLASSES, ("fp16", "fp32")),
    "everything, whole rows": (EVERYTHING, True, (True,), FEW_CLASSES, ("bf16",)),
    "probabilities": (PROBABILITIES, True, (), CLASSES, ("bf16",)),
    "probabilities, whole rows": (PROBABILITIES, True, (), FEW_CLASSES, ("bf16",)),
    "loss and lse": ("lse=true", False, (), CLASSES, ("bf16",)),
    "backward of both": (f"label_smoothing=0.1 {SOFTCAP}", True, (True, True), CLASSES, ("fp16",)),
    "shard": (SHARD, True, (True, True), SOME_CLASSES, ("bf16",)),
    "no target": (f"target=none {PLAIN}", False, (), CLASSES, ("bf16",)),
    "backward of no target": (f"target=none {SOFTCAP}", False, (True,), CLASSES, ("fp16",)),
}


def unit(words, weighted, scales, classes, dtype, options=None):
    """One launch of the kernel of a spec."""
    options = options or row_options(classes, DTYPES[dtype])
    spec = Spec.parse(f"{Spec(reduction='sum').text()} {words}".strip())
    names = (*scales, *[False] * (2 - len(scales)))
    whole_row, padded = options["BLOCK_V"] >= classes, classes % 16 != 0
    kernel = row(spec, weighted, *names, whole_row, padded)
    target = "*u8" if dtype == "fp32" and words == PLAIN else TYPES["target"]
    if spec.target == "probabilities":
        target = f"*{dtype}"
    return Unit(
        kernel.source,
        kernel.name,
        {**TYPES, "logits": f"*{dtype}", "target": target},
        {"BLOCK_V": options["BLOCK_V"]},
        {"num_warps": options["num_warps"]},
        tuple(name for name in ALIGNED if name != "V" or not padded),
    )


def units(target):
    """One for each row of the table."""
    out = {
        f"{label}, {dtype}": unit(*kernel, dtype)
        for label, (*kernel, dtypes) in KERNELS.items()
        for dtype in dtypes
    }
    for label in ALL_CANDIDATES if target not in LIKE_SM_80 else ():
        words, *others, classes, (dtype, *_) = KERNELS[label]
        spec = Spec.parse(f"{Spec().text()} {words}")
        candidates = row_candidates(classes, DTYPES[dtype], target, spec)
        for options in candidates[1:]:
            size = f"{options['BLOCK_V']} by {options['num_warps']} warps"
            out[f"{label}, {dtype}, {size}"] = unit(words, *others, classes, dtype, options)
    return out


# The kernels whose every candidate is compiled: those with the most values for each logit.
ALL_CANDIDATES = (
    *("everything", "probabilities", "shard"),
    *(f"{label}, some classes" for label in ("plain", "soft-cap", "probabilities", "everything")),
)
# Targets with the registers of sm_80, where the candidates are not compiled once more.
LIKE_SM_80 = ("sm_86", "sm_89")


@pytest.mark.parametrize("target", TARGETS)
def test_row_kernels(target):
    compare(GOLDEN, target, resources(units(target), target))


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


# ---------------------------------------------------------------- the table can fail


def test_a_spill_is_found():
    """A hundred and more values in each of 32 threads, all of which are needed to the end."""
    large = unit(PLAIN, False, (), 8192, "fp32", {"BLOCK_V": 1 << 13, "num_warps": 1})
    found = resources({"large": large}, "sm_80")
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
