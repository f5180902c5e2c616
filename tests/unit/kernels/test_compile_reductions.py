"""Kernels of class reductions taken to machine code for GPUs that need not be there: nothing spills,
and registers, shared memory and instructions are within bounds."""

from __future__ import annotations

import torch

from fxpass.kernels.call import Gpu, Launch, for_reductions
from fxpass.kernels.render import reductions_kernel
from tests.support.compiled import Unit, assert_fits, loops, resources
from tests.support.specs import spec_of
from tests.support.without_data import operands

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = {
    "bias": "*fp32",
    "scale": "*fp32",
    "picks": "*i64",
    "given0": "*fp32",
    "given1": "*bf16",
    "given0_stride": "i32",
    "given1_stride": "i32",
    "outputs": "*fp32",
    "indices": "*i64",
    "lse": "*fp32",
    "rest": "*fp32",
    "saved": "*fp32",
    "incoming": "*fp32",
    "stride": "i32",
    "N": "i32",
    "V": "i32",
    "slice_start": "i32",
}
ALIGNED = (*("logits", "stride", "given0", "given1", "given1_stride", "V"),)
CLASSES, SOME_CLASSES, FEW_CLASSES, ODD_CLASSES = 128256, 16032, 4096, 50257
SOFTCAP = "transform=30*tanh(z/30)"
POLICY = "outputs=argmax;moment(1,1);pick gradients=x"
OF_WEIGHTS = "outputs=moment(0,1,1);moment(1,2,0) gradients=x"
MAXIMA = f"outputs=argmax;lse;max {SOFTCAP} gradients=x detached=max"
POLICY_LOSS = "gradients=x total=moment(1,1);pick"
TOTAL = f"outputs=argmax {POLICY_LOSS}"
SQUARES = f"outputs=lse;moment(0,2);moment(1,2);moment(2,2);pick {SOFTCAP} gradients=x"

MASK = "transform=where(given0>0,-inf,given1*z)"

# label: spec, classes, dtype of the logits, and the operands that are present
KERNELS: dict[str, tuple[str, int, str, dict[str, object]]] = {
    "log-probabilities": ("outputs=pick gradients=x", CLASSES, "bf16", {"picks": 1}),
    "policy": (POLICY, CLASSES, "bf16", {"picks": 1}),
    "policy, some classes": (POLICY, SOME_CLASSES, "bf16", {"picks": 1}),
    "policy, fp32": (POLICY, CLASSES, "fp32", {"picks": 1}),
    "policy, whole rows": (POLICY, FEW_CLASSES, "fp16", {"picks": 1, "scaled": True}),
    "several picks": (POLICY, ODD_CLASSES, "bf16", {"picks": 20}),
    "weights": (OF_WEIGHTS, CLASSES, "bf16", {"given": (False, True)}),
    "weights, whole rows": (OF_WEIGHTS, FEW_CLASSES, "bf16", {"given": (False, True)}),
    "maxima": (MAXIMA, CLASSES, "bf16", {"scaled": True}),
    "maxima, whole rows": (MAXIMA, FEW_CLASSES, "bf16", {"scaled": True}),
    "squares": (SQUARES, ODD_CLASSES, "fp16", {"picks": 1, "scaled": True, "bias": torch.float32}),
    "total": (TOTAL, CLASSES, "bf16", {"picks": 1}),
    "total, some classes": (TOTAL, SOME_CLASSES, "bf16", {"picks": 1}),
    "total, whole rows": (TOTAL, FEW_CLASSES, "bf16", {"picks": 1}),
    "loss": ("gradients=x total=pick", CLASSES, "bf16", {"picks": 1}),
    "loss and its value": ("outputs=pick gradients=x total=pick", CLASSES, "bf16", {"picks": 1}),
    "evaluated loss": ("outputs=pick", CLASSES, "bf16", {"picks": 1}),
    "mask": (
        f"outputs=argmax {MASK} {POLICY_LOSS}",
        CLASSES,
        "bf16",
        {"picks": 1, "given": (False, True)},
    ),
    "mask, whole rows": (
        f"outputs=argmax;moment(1,1);pick {MASK} gradients=x",
        FEW_CLASSES,
        "bf16",
        {"picks": 1, "given": (False, True)},
    ),
    "total, several picks": (TOTAL, CLASSES, "bf16", {"picks": 3, "scaled": True}),
}


def units(target: str) -> dict[str, Unit]:
    """One for each launch."""
    found = {}
    for label, (text, classes, dtype, present) in KERNELS.items():
        spec = spec_of(text)
        given = operands(8, 64, classes, DTYPES[dtype], **present)  # type: ignore[arg-type]
        for forward in (True, False) if not spec.total else (True,):
            trained = spec if forward else spec.of_backward
            (launch,) = for_reductions(trained, given, Gpu("", target), forward)
            name = f"{label}, {'forward' if forward else 'backward'}"
            found[name] = unit(launch, dtype, present.get("picks", 0), classes % 16 == 0)  # type: ignore[arg-type]
    return found


def unit(launch: Launch, dtype: str, picks: int, aligned: bool) -> Unit:
    source, name = launch.source, launch.name
    constants = {"K": picks, "PICKS": 1 << max(0, picks - 1).bit_length()}
    constants |= {name: size for name, size in launch.items if name.isupper()}
    constants |= {"given0_step": 1, "given1_step": 1}
    ragged = () if aligned else ("V",)
    return Unit(
        source,
        name,
        {**TYPES, "logits": f"*{dtype}"},
        {key: value for key, value in constants.items() if f"    {key}: tl.constexpr" in source},
        {name: option for name, option in launch.items if name.islower()},
        tuple(name for name in ALIGNED if name not in ragged),
    )


def test_kernels_of_reductions(target):
    found = units(target)
    assert_fits(resources(found, target), found, target)


# ---------------------------------------------------------------- instructions

LOSS, SLICE = "gradients=x total=pick", "outputs=pick gradients=x"
# At most, for a logit in the loops over blocks, on any of the three. A kernel that was written for
# the loss alone took 27.6 on sm_90, with exp() in place of exp2(); sums of a block, a barrier each, in
# place of those of lanes take 20.6.
INSTRUCTIONS = {LOSS: 20, POLICY_LOSS: 24, SLICE: 11}


def test_instructions_for_a_logit(nvidia):
    """The classes of a pick's block apart, which only one block has."""
    options = (("BLOCK_V", 8192), ("LANES", 512), ("VECTOR", 8), ("num_warps", 16))
    units = {}
    for text in INSTRUCTIONS:
        spec = spec_of(text)
        kernel = reductions_kernel(spec, forward=bool(spec.total))
        units[text] = unit(Launch(Gpu("", ""), kernel, options), "bf16", 1, True)
    for text, found in loops(units, nvidia).items():
        assert 0 < sum(found) / (8192 / 512) <= INSTRUCTIONS[text], (text, found)
