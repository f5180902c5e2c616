"""The kernels of tiles taken to machine code for GPUs that need not be there, and what they take."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxpass.kernels import render
from fxpass.kernels.render import Gemm
from fxpass.kernels.tile_config import configs_for, has_descriptors, specializes_warps
from fxpass.spec import expression
from fxpass.spec.spec import Spec
from tests.support.compiled import TARGETS, Unit, compare, resources
from tests.support.tiled_runs import SMALL

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLE = Path(__file__).with_name("compiled_tiles.md")

F32_POINTERS = (
    *("class_weight", "class_mass", "row_scale", "lse_scale", "lse", "lse_rest", "loss"),
    "row_mass",
    *("maxima", "sums", "picks", "dots", "masses"),
)
TYPES = {
    **dict.fromkeys(F32_POINTERS, "*fp32"),
    "target": "*i64",
}
OPERANDS = ("x", "weight", "bias", "g")
ALIGNED = (
    *(*F32_POINTERS, *OPERANDS, "target"),
    *("x_stride", "weight_stride", "target_stride", "g_stride", "D", "V", "first"),
)
PLAIN = Spec()
SHARD = Spec(label_smoothing=0.1, shard_of=128256)
EVERYTHING = Spec(label_smoothing=0.1, transform=expression.parse("30*tanh(z/30)"))
PROBABILITIES = dataclasses.replace(EVERYTHING, target="probabilities")


def gemm_of(target, dtype, biased=False):
    precision = "ieee" if dtype == "fp32" else ""
    return Gemm(biased, precision, has_descriptors(target), specializes_warps(target))


def unit(kernel, dtype, config, **known):
    """A launch of a kernel of tiles, with operands of one dtype."""
    types = {**TYPES, **dict.fromkeys(OPERANDS, f"*{dtype}")}
    if "target_stride" in kernel.source:
        types["target"] = "*fp32"  # probabilities
    if "x_stride" not in kernel.source:
        for name, rows in (("x", config.BLOCK_N), ("weight", config.BLOCK_V)):
            types[name] = f"tensordesc<{dtype}[{rows}, {config.BLOCK_D}]>"
    _, _, text = kernel.source.partition(f"def {kernel.name}(")
    parameters = re.findall(r"^    (\w+)(?:: tl.constexpr)?,$", text.partition("):")[0], re.M)
    constants = {name: size for name, size in (config.sizes | known).items() if name in parameters}
    signature = {name: types.get(name, "i32") for name in parameters}
    jit = kernel.source.partition("@triton.jit(")[2].partition(")")[0]
    aligned = tuple(name for name in ALIGNED if f'"{name}"' not in jit)
    return Unit(kernel.source, kernel.name, signature, constants, config.options, aligned)


def kernels(target):
    """The label, dtype, spec and text of each kernel, each dtype and each feature at least once."""
    low = "fp16" if target == "sm_75" else "bf16"  # sm_75 has no bf16
    gemm = {dtype: gemm_of(target, dtype) for dtype in DTYPES}
    biased = {dtype: gemm[dtype]._replace(biased=True) for dtype in DTYPES}
    if target != "sm_75":
        biased["fp32"] = biased["fp32"]._replace(precision="tf32")
    flags = (True, True, True)  # class weights, scales of loss and lse
    forward, backward = render.forward, render.backward
    for dtype in (low, "fp32"):
        yield "forward", dtype, PLAIN, forward(PLAIN, False, gemm[dtype])
        yield "backward", dtype, PLAIN, backward(PLAIN, False, True, False, gemm[dtype])
    for dtype in (low, "fp32"):
        for label, spec in (("everything", EVERYTHING), ("probabilities", PROBABILITIES)):
            yield f"forward, {label}", dtype, spec, forward(spec, True, biased[dtype])
            yield f"backward, {label}", dtype, spec, backward(spec, *flags, biased[dtype])
    if low != "fp16":
        yield "forward, everything", "fp16", EVERYTHING, forward(EVERYTHING, True, biased["fp16"])
    yield "backward, weights", low, PLAIN, backward(PLAIN, *flags, biased[low])
    yield "backward, shard", low, SHARD, backward(SHARD, *flags, gemm[low])


def units(target):
    """Every candidate of every kernel; the default has no number."""
    out = {}
    for label, dtype, spec, kernel in kernels(target):
        for place, config in enumerate(configs_for(target, DTYPES[dtype], spec), 1):
            number = f", candidate {place}" if place > 1 else ""
            out[f"{label}, {dtype}{number}"] = unit(kernel, dtype, config)
    merge = unit(render.merge(SHARD, True), "fp32", SMALL, SPLITS=256)
    return out | {"merge, shard": dataclasses.replace(merge, options={"num_warps": 1})}


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_nothing_spills(target):
    compare(TABLE, target, resources(units(target), target))


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "sm_100", "gfx942"])
def test_the_small_tiles_of_other_tests_compile(target):
    """Warp specialisation needs four warps or more."""
    small = {label: unit(kernel, dtype, SMALL) for label, dtype, _, kernel in kernels(target)}
    resources({label: small[label] for label in ("forward", "backward")}, target)


def test_descriptors_and_warp_specialisation_where_the_target_has_them():
    assert "x.load" in units("sm_90")["forward, bf16"].source
    assert "warp_specialize" not in units("sm_90")["forward, bf16"].source
    assert "warp_specialize=True" in units("sm_100")["forward, bf16"].source
    assert "x.load" not in units("sm_80")["forward, bf16"].source


# ---------------------------------------------------------------- addresses

SCRIPT = """
import sys
from pathlib import Path
from tests.support import compiled
from tests.unit.kernels import test_tile_compile as tests
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

target = GPUTarget("cuda", 80, 32)
backend = make_backend(target)
options = backend.parse_options({})
for unit in tests.addressed().values():
    function = compiled.load(unit, Path(sys.argv[1]))
    signature = {
        name: "constexpr" if name in unit.constants else unit.signature[name]
        for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=dict(unit.constants))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    print(source.make_ir(target, options, codegen, backend.get_module_map(), context))
"""


def addressed():
    """Kernels that together multiply by every stride that there is."""
    config = configs_for("sm_80", torch.bfloat16, Spec())[0]
    spec, gemm = Spec(target="probabilities", gradients=("x",)), Gemm()
    kernels = {
        "forward": render.forward(spec, False, gemm),
        "backward": render.backward(spec, False, True, True, gemm),
        "mass": render.mass(spec, False),
        "merge": render.merge(spec, False),
    }
    return {label: unit(kernel, "bf16", config, SPLITS=16) for label, kernel in kernels.items()}


def test_addresses_are_64_bits_wide(tmp_path):
    """Nothing is multiplied by the elements of a row, or by splits, before it is an int64."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert not out.returncode, out.stderr
    code = [line for line in out.stdout.splitlines() if "tt.func" not in line]
    used = {}
    for line in code:
        for stride in re.findall(r"%(\w+_stride)\b", line):
            used.setdefault(stride, []).append(line.partition("=")[2].partition(":")[2])
    strides = {"x_stride", "weight_stride", "target_stride", "g_stride"}
    assert used.keys() == strides
    for stride in strides:
        assert {use.split(" loc")[0].strip() for use in used[stride]} == {"i32 to i64"}, stride
