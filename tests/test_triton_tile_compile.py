"""The kernels of tiles taken to machine code for GPUs that need not be there, and what they take."""

from pathlib import Path

import pytest
import torch
from compiled import TARGETS, Unit, compare, resources

from fxpass import triton_tile_source
from fxpass.spec import Spec
from fxpass.triton_tile_body import Gemm
from fxpass.triton_tile_config import configs_for, has_descriptors, specializes_warps

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLE = Path(__file__).with_name("compiled_tiles.md")

POINTERS = {
    name: "*fp32"
    for name in (
        *("class_weight", "class_mass", "row_scale", "lse_scale", "lse", "loss", "row_mass"),
        *("maxima", "sums", "picks", "dots", "masses"),
    )
}
TYPES = {**POINTERS, "target": "*i64", "resolution": "fp32", "flags": "*i32"}
ALIGNED = (
    *POINTERS,
    *("x", "weight", "bias", "target", "g", "flags"),
    *("x_stride", "weight_stride", "target_stride", "g_stride", "D", "V", "first"),
)
SOFTCAP = "logits=30*tanh(z/30)"
EVERYTHING = f"label_smoothing=0.1 {SOFTCAP}"


def spec_of(words):
    plain = Spec(reduction="sum").text()
    return Spec.parse(f"{plain} {words}".strip())


def gemm_of(target, dtype, biased=False):
    precision = ("ieee" if target == "sm_75" else "tf32") if dtype == "fp32" else ""
    return Gemm(biased, precision, has_descriptors(target), specializes_warps(target))


def unit(kernel, dtype, config, **types):
    """A launch of a kernel of tiles, with operands of one dtype."""
    source = kernel.source
    types = {**TYPES, **dict.fromkeys(("x", "weight", "bias", "g"), f"*{dtype}"), **types}
    sizes = {name: size for name, size in config.sizes.items() if f"{name}: tl" in source}
    if "x_stride" not in source:
        for name, rows in (("x", config.BLOCK_N), ("weight", config.BLOCK_V)):
            types[name] = f"tensordesc<{dtype}[{rows}, {config.BLOCK_D}]>"
    names = source.partition("def linear")[2].partition("(")[2].partition("):")[0].split(",")
    signature = {n: types.get(n, "i32") for n in (name.strip() for name in names) if n}
    return Unit(source, kernel.name, signature, sizes, config.options, ALIGNED)


def units(target, dtype):
    """Forward and backward, plain and with everything."""
    config, gemm = configs_for(target, DTYPES[dtype])[0], gemm_of(target, dtype, biased=True)
    plain, everything = spec_of(""), spec_of(EVERYTHING)
    kernels = {
        "forward": triton_tile_source.forward(plain, False, gemm._replace(biased=False)),
        "forward, everything": triton_tile_source.forward(everything, True, gemm),
        "backward": triton_tile_source.backward(
            plain, False, True, False, gemm._replace(biased=False)
        ),
        "backward, everything": triton_tile_source.backward(everything, True, True, True, gemm),
    }
    return {f"{label}, {dtype}": unit(kernel, dtype, config) for label, kernel in kernels.items()}
