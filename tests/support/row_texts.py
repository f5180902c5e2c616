"""Texts of loops, their tensors, and what interpreting them gives.

In: a text. Out: tensors that fit it, and its results in the dtypes of the text, or in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.op.rows import rows
from fxpass.region.loop import Loop
from fxpass.region.run import Interpreter
from tests.support.numerics import FLOOR, error

CPU = torch.device("cpu")
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
N = 23

# A divergence of two heads of different dtypes and hidden sizes, and its gradients; a tangent that
# is expanded; a class index; a sum over all rows, and one by classes.
DIVERGENCE = """rows rows=0,2,5,6 sums=1,2,4,6,7 wide=2 memory_mb=0 compiled=0
%0 = input {a}[n, 5]
%1 = input {a}[v, 5]
%2 = input {b}[n, 6]
%3 = input {b}[v, 6]
%4 = input {a}[v]
%5 = input {c}[n, v]
%6 = input int64[n, 1]
%7 = aten.t.default(%1)
%8 = aten.addmm.default(%4, %0, %7)
%9 = aten.permute.default(%3, [1, 0])
%10 = aten.mm.default(%2, %9)
%11 = aten._to_copy.default(%8, dtype={c})
%12 = aten._to_copy.default(%10, dtype={c})
%13 = aten._log_softmax.default(%11, 1, False)
%14 = aten._softmax.default(%12, 1, False)
%15 = aten.gather.default(%13, 1, %6)
%16 = aten.mul.Tensor(%13, %14)
%17 = aten.mul.Tensor(%16, %5)
%18 = aten.sum.dim_IntList(%17, [0, 1])
%19 = aten.exp.default(%13)
%20 = aten.sub.Tensor(%19, %14)
%21 = aten.mul.Tensor(%20, %5)
%22 = aten._to_copy.default(%21, dtype={a})
%23 = aten.permute.default(%22, [0, 1])
%24 = aten.t.default(%23)
%25 = aten.mm.default(%24, %0)
%26 = aten.mm.default(%22, %1)
%27 = aten._to_copy.default(%20, dtype={b})
%28 = aten.t.default(%2)
%29 = aten.mm.default(%28, %27)
%30 = aten.mm.default(%27, %3)
%31 = aten._to_copy.default(%30, dtype={c})
%32 = aten.sum.dim_IntList(%22, [0], dtype={c})
%33 = aten.argmax.default(%8, 1)
%34 = aten.eq.Scalar(%33, 3)
%35 = aten.sum.dim_IntList(%34, [0])
return %15, %18, %25, %26, %29, %31, %32, %35"""
# Rows that are multiplied twice, two products of one gradient, a gradient that is multiplied with
# rows that the function makes, a bias of the function, and a result that is an input.
LOW_RANK = """rows rows=0,1 sums=2,3,4 wide= memory_mb=0 compiled=0
%0 = input {a}[n, 5]
%1 = input float64[n]
%2 = input {a}[11, 5]
%3 = input {a}[4, 5]
%4 = input {a}[11, 4]
%5 = aten.t.default(%2)
%6 = aten.mm.default(%0, %5)
%7 = aten.t.default(%3)
%8 = aten.mm.default(%0, %7)
%9 = aten.t.default(%4)
%10 = aten.mm.default(%8, %9)
%11 = aten.add.Tensor(%6, %10)
%12 = aten.tanh.default(%11)
%13 = aten.mm.default(%12, %4)
%14 = aten.t.default(%12)
%15 = aten.mm.default(%14, %0)
%16 = aten.mm.default(%14, %8)
%17 = aten.t.default(%13)
%18 = aten.mm.default(%17, %0)
%19 = aten.mm.default(%12, %2)
return %1, %19, %15, %16, %18"""
# The mean of a cross-entropy, some of whose rows are ignored, and its gradients; an accuracy, and
# an entropy. It has a formula, with a total.
LOSS = """rows rows=0,1,3,4 sums=1,4 wide= memory_mb=0 compiled=0
%0 = input bool[n, 1]
%1 = input {a}[n, 5]
%2 = input {a}[11, 5]
%3 = input int64[n, 1]
%4 = input {c}[n, 1]
%5 = aten.permute.default(%2, [1, 0])
%6 = aten.mm.default(%1, %5)
%7 = aten._to_copy.default(%6, dtype={c})
%8 = aten._log_softmax.default(%7, 1, False)
%9 = aten.gather.default(%8, 1, %3)
%10 = aten.zeros_like.default(%9)
%11 = aten.where.self(%0, %9, %10)
%12 = aten.zeros_like.default(%4)
%13 = aten.where.self(%0, %4, %12)
%14 = aten.sym_size.int(%1, 0)
%15 = aten.full.default([%14, 11], 0, dtype={c})
%16 = aten.scatter.value(%15, 1, %3, -1.0)
%17 = aten.mul.Tensor(%16, %13)
%18 = aten.exp.default(%8)
%19 = aten.sum.dim_IntList(%17, [1], True)
%20 = aten.mul.Tensor(%18, %19)
%21 = aten.sub.Tensor(%17, %20)
%22 = aten._to_copy.default(%21, dtype={a})
%23 = aten.permute.default(%22, [0, 1])
%24 = aten.t.default(%23)
%25 = aten.mm.default(%24, %1)
%26 = aten.mm.default(%22, %2)
%27 = aten.argmax.default(%8, 1, True)
%28 = aten.eq.Tensor(%27, %3)
%29 = aten.logical_and.default(%28, %0)
%30 = aten.sum.dim_IntList(%22, [0], dtype={c})
%31 = aten.mul.Tensor(%18, %8)
%32 = aten.sum.dim_IntList(%31, [1], True)
%33 = aten.where.self(%0, %32, %10)
return %11, %25, %26, %29, %30, %33"""
# Of rows whose incoming gradients are made of the outputs: the sum of the label's probability.
PROBABILITY = """rows rows=0,2 sums=1 wide= memory_mb=0 compiled=0
%0 = input {a}[n, 5]
%1 = input {a}[11, 5]
%2 = input int64[n, 1]
%3 = aten.permute.default(%1, [1, 0])
%4 = aten.mm.default(%0, %3)
%5 = aten._to_copy.default(%4, dtype={c})
%6 = aten._log_softmax.default(%5, 1, False)
%7 = aten.gather.default(%6, 1, %2)
%8 = aten.exp.default(%7)
%9 = aten.sym_size.int(%0, 0)
%10 = aten.full.default([%9, 11], 0, dtype={c})
%11 = aten.scatter.value(%10, 1, %2, 1.0)
%12 = aten.mul.Tensor(%11, %8)
%13 = aten.exp.default(%6)
%14 = aten.sum.dim_IntList(%12, [1], True)
%15 = aten.mul.Tensor(%13, %14)
%16 = aten.sub.Tensor(%12, %15)
%17 = aten._to_copy.default(%16, dtype={a})
%18 = aten.permute.default(%17, [0, 1])
%19 = aten.t.default(%18)
%20 = aten.mm.default(%19, %0)
%21 = aten.mm.default(%17, %1)
return %8, %20, %21"""
FORMULAS = {
    "a loss": LOSS.format(a="float32", c="float32"),
    "a loss, bf16": LOSS.format(a="bfloat16", c="float32"),
    "a probability": PROBABILITY.format(a="float32", c="float32"),
    "a probability, fp16": PROBABILITY.format(a="float16", c="float32"),
}
TEXTS = {
    "f32": DIVERGENCE.format(a="float32", b="float32", c="float32"),
    "f64 and f32": DIVERGENCE.format(a="float64", b="float32", c="float64"),
    "bf16 and f32": DIVERGENCE.format(a="bfloat16", b="float32", c="float32"),
    "low rank": LOW_RANK.format(a="float32"),
    "low rank, bf16": LOW_RANK.format(a="bfloat16"),
    **FORMULAS,
}


def tensors_of(text: str, n: int = N, v: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    found = []
    for of in Loop.parse(text).inputs:
        shape = [s if isinstance(s, int) else {"n": n, "v": v}[s] for s in of.shape]
        if of.dtype == torch.bool:
            made = torch.rand(shape) < 0.8
        elif not of.dtype.is_floating_point:
            made = torch.randint(v, shape)
        elif of.shape == ("n", "v"):  # an expanded number of each row
            made = torch.randn(n, 1).to(of.dtype).expand(n, v)
        else:
            made = torch.randn(shape).to(of.dtype)
        found.append(made)
    return found


def interpreted(text: str, tensors: list[Tensor], wide: bool = False) -> list[Tensor]:
    """The text on all rows; ``wide`` in float64."""
    if wide:
        for name in ("bfloat16", "float16", "float32"):
            text = text.replace(name, "float64")
        tensors = [t.double() if t.is_floating_point() else t for t in tensors]
    return Interpreter(Loop.parse(text).graph, CPU)(list(tensors))


def assert_as_interpreted(text: str, tensors: list[Tensor]) -> None:
    loop, exact = Loop.parse(text), interpreted(text, tensors, wide=True)
    narrow = {t.dtype for t in tensors if t.is_floating_point()}
    floor = max(FLOOR[dtype] for dtype in narrow)
    for i, (got, theirs) in enumerate(
        zip(rows(tensors, text), interpreted(text, tensors), strict=True)
    ):
        assert (got.dtype, got.shape) == (loop.dtype(i), theirs.shape)
        assert got.is_contiguous()
        if not len(tensors[0]):
            assert not got.any()
        elif got.dtype.is_floating_point:
            assert error(got, exact[i]) <= 2 * error(theirs, exact[i]) + floor, i
        else:
            torch.testing.assert_close(got, theirs)
