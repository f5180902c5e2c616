"""Generated kernels taken to machine code for GPUs that need not be there.

Triton brings its assemblers along. One process compiles everything, without TRITON_INTERPRET:
that variable decides at import what ``triton.jit`` makes of a function.
"""

import json
import os
import subprocess
import sys

import pytest

TARGETS = ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942")

SCRIPT = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fxpass import triton_chunked
from fxpass.spec import Spec
from fxpass.triton_source import generate

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = dict(target="*i64", class_weight="*fp32", row_scale="*fp32", lse_scale="*fp32", loss="*fp32",
             lse="*fp32", stride="i32", target_stride="i32", V="i32", BLOCK_V="constexpr")
ALIGNED = ("logits", "class_weight", "stride", "target_stride", "V")
SOFTCAP = "logits=30*tanh(z/30) gradients=x"
KERNELS = {  # spec, class weights, scales of loss and lse, dtype of the logits, types that differ
    "forward": ("", False, (), "bf16", {}),
    "plain": ("gradients=x", False, (), "bf16", {}),
    "fp16": ("gradients=x", False, (True,), "fp16", {}),
    "fp32, uint8": ("gradients=x", False, (), "fp32", {"target": "*u8"}),
    "soft-cap": (SOFTCAP, False, (), "bf16", {}),
    "everything": ("ignore_index=-1 label_smoothing=0.1 " + SOFTCAP, True, (True,), "fp16", {}),
    "probabilities": ("target=probabilities label_smoothing=0.1 gradients=x", True, (), "bf16",
                      {"target": "*bf16"}),
    "loss and lse": ("lse=true", False, (), "bf16", {}),
    "backward of both": ("label_smoothing=0.1 " + SOFTCAP, True, (True, True), "fp16", {}),
    "no target": ("target=none gradients=x", False, (), "bf16", {}),
    "backward of no target": ("target=none " + SOFTCAP, False, (True,), "fp16", {}),
}

def compiled(target, words, weighted, scales, dtype, types):
    kernel = generate(Spec.parse(f"v3 reduction=sum {words}".strip()), weighted, *scales)
    function = triton_chunked.load(kernel)
    types = {**TYPES, "logits": "*" + dtype, **types}
    options = triton_chunked._launch_options(128256, DTYPES[dtype])
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: types[name] for name in names},
        constexprs={"BLOCK_V": options.pop("BLOCK_V")},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ALIGNED},
    )
    return triton.compile(source, target=target, options=options)

sizes = {}
for name in %(targets)r:
    hip = name.startswith("gfx")
    target = GPUTarget("hip", name, 64) if hip else GPUTarget("cuda", int(name[3:]), 32)
    for label, kernel in KERNELS.items():
        out = compiled(target, *kernel)
        sizes[f"{name} {label}"] = len(out.asm["hsaco" if hip else "cubin"])
print(json.dumps(sizes))
"""


def test_kernels_compile(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT % {"targets": TARGETS}],
        env={**environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        pytest.fail(process.stderr)
    sizes = json.loads(process.stdout)
    assert len(sizes) == 11 * len(TARGETS)
    assert min(sizes.values()) > 1000
