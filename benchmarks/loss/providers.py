"""The providers of a loss: name → :class:`Provider`, which makes a function of a program's.

A provider that compiles gets the same plain PyTorch program; a library gets a call of its function.
Shapes are static, as in a training loop: for a second size, Dynamo would compile for symbolic
shapes, which are slower and which Inductor's ``auto_chunker`` does not support.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.case import CROSS_ENTROPY, Case
from benchmarks.loss.programs import Function, plain

__all__ = ["BARE", "PROVIDERS", "Loss", "Provider", "plain"]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """A provider of the loss.

    Attributes:
        label: its name in a table.
        make: makes a function from a program's and the cap on its logits.
        compiles: whether its first step compiles.
        programs: whether it takes any program; else it computes a mean cross-entropy.
        package: the pip package that it needs, the module to import, and the version whose call is
            made here.
        gpu: whether it needs a GPU.
        softcap: whether it supports a cap on the logits.
    """

    label: str
    make: Callable[..., Function]
    compiles: bool = False
    programs: bool = False
    package: tuple[str, str, str] | None = None
    gpu: bool = False
    softcap: bool = True

    def problem(self, case: Case) -> str:
        """Why it cannot run; empty if it can."""
        if not self.programs and (case.program != CROSS_ENTROPY or case.layers):
            return "it computes nothing but the cross-entropy of a linear"
        if self.package and importlib.util.find_spec(self.package[1]) is None:
            return f"{self.package[0]} is not installed"
        if self.gpu and torch.device(case.device).type != "cuda":
            return f"its kernels need a GPU, and this is {case.device}"
        if case.softcap and not self.softcap:
            return "it has no soft-cap"
        return ""


def _eager(function: Function = plain, softcap: float = 0.0) -> Function:
    return function


def _compiled(function: Function = plain, softcap: float = 0.0, **how: Any) -> Function:
    return torch.compile(function, dynamic=False, **how)


# By default it chunks only logits that are 8 times as large as x and weight together, which
# excludes every head here with fewer than about 8 D rows.
_CHUNKER = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 1}


def _core(function: Function = plain, softcap: float = 0.0) -> Loss:
    return lambda x, w, labels: F.linear_cross_entropy(
        x, w, labels, options=torch.nn.LinearCrossEntropyOptions()
    )


def _liger(function: Function = plain, softcap: float = 0.0) -> Function:
    functional = importlib.import_module("liger_kernel.transformers.functional")
    return functools.partial(
        functional.liger_fused_linear_cross_entropy, softcap=softcap if softcap else None
    )


def _cce(function: Function = plain, softcap: float = 0.0) -> Function:
    # the default, with the gradient filter
    call = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return functools.partial(call, softcap=softcap if softcap else None)


def _quack(function: Function = plain, softcap: float = 0.0) -> Loss:
    module = importlib.import_module("quack.linear_cross_entropy")

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        # the same choice as in quack.linear_cross_entropy.LinearCrossEntropy
        if len(x) % 8 == 0 and len(w) % 8 == 0 and x.shape[1] % 8 == 0:
            return module.chunked_linear_cross_entropy(x, w, labels, chunk_size=4096)
        return module.linear_cross_entropy_func(x, w, None, labels)

    return loss


def _compiles(label: str, **how: Any) -> Provider:
    return Provider(label, functools.partial(_compiled, **how), compiles=True, programs=True)


def _fusedce(label: str, strategy: str) -> Provider:
    return _compiles(label, backend="fusedce", options={"fusedce.strategy": strategy})


def _library(label: str, make: Callable[..., Function], *package: str, **has: bool) -> Provider:
    name, module, version = package
    return Provider(label, make, compiles=True, package=(name, module, version), gpu=True, **has)


BARE = "bare"
PROVIDERS: dict[str, Provider] = {
    # computes no loss, see benchmarks.loss.worker.Bare; this row has its name and position
    BARE: Provider("bare GEMMs", _eager),
    "eager": Provider("eager", _eager, programs=True),
    "inductor": _compiles("inductor"),
    "auto_chunker": _compiles("inductor, `auto_chunker`", options=_CHUNKER),
    "core": Provider("core's `linear_cross_entropy(options=...)`", _core, softcap=False),
    "liger": _library("Liger", _liger, "liger-kernel", "liger_kernel", "0.8.5"),
    "cce": _library("Cut Cross-Entropy", _cce, "cut-cross-entropy", "cut_cross_entropy", "25.1.1"),
    "quack": _library("QuACK", _quack, "quack-kernels", "quack", "0.6.5", softcap=False),
    "fusedce": _fusedce("**fusedce**", "auto"),
    "fusedce_chunked": _fusedce("fusedce, `chunked`", "chunked"),
    "fusedce_tiled": _fusedce("fusedce, `tiled`", "tiled"),
}
