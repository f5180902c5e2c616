"""The providers of a loss: name → :class:`Provider`, which makes ``(x, weight, target) -> loss``.

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

from benchmarks.loss.case import Case

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The program: x ``[N, D]``, weight ``[V, D]``, target int64 ``[N]``; mean loss in f32."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def program(softcap: float = 0.0) -> Loss:
    """:func:`plain`, or the same with a cap on the logits, spelled as in transformers' Gemma 2."""
    if not softcap:
        return plain

    def capped(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        logits = logits / softcap
        logits = torch.tanh(logits)
        logits = logits * softcap
        return F.cross_entropy(logits.float(), target)

    return capped


@dataclass(frozen=True)
class Provider:
    """A provider of the loss.

    Attributes:
        label: its name in a table.
        make: makes the loss from the cap on the logits.
        compiles: whether its first step compiles.
        package: the pip package that it needs, and the module to import.
        gpu: whether it needs a GPU.
        softcap: whether it supports a cap on the logits.
        version: the package version whose call is made here.
    """

    label: str
    make: Callable[[float], Loss]
    compiles: bool = False
    package: tuple[str, str] | None = None
    gpu: bool = False
    softcap: bool = True
    version: str = ""

    def __call__(self, softcap: float = 0.0) -> Loss:
        return self.make(softcap)

    def problem(self, case: Case) -> str:
        """Why it cannot run; empty if it can."""
        if self.package and importlib.util.find_spec(self.package[1]) is None:
            return f"{self.package[0]} is not installed"
        if self.gpu and torch.device(case.device).type != "cuda":
            return f"its kernels need a GPU, and this is {case.device}"
        if case.softcap and not self.softcap:
            return "it has no soft-cap"
        return ""


def _eager(softcap: float) -> Loss:
    return program(softcap)


def _compiled(softcap: float, **how: Any) -> Loss:
    return torch.compile(program(softcap), dynamic=False, **how)


def _auto_chunker(softcap: float) -> Loss:
    # By default it chunks only logits that are 8 times as large as x and weight together, which
    # excludes every head here with fewer than about 8 D rows.
    options = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 1}
    return _compiled(softcap, options=options)


def _fusedce(softcap: float, strategy: str) -> Loss:
    return _compiled(softcap, backend="fusedce", options={"fusedce.strategy": strategy})


def _core(softcap: float) -> Loss:
    return lambda x, weight, target: F.linear_cross_entropy(
        x, weight, target, options=torch.nn.LinearCrossEntropyOptions()
    )


def _liger(softcap: float) -> Loss:
    functional = importlib.import_module("liger_kernel.transformers.functional")
    return functools.partial(
        functional.liger_fused_linear_cross_entropy, softcap=softcap if softcap else None
    )


def _cce(softcap: float) -> Loss:
    # the default, with the gradient filter
    call = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return functools.partial(call, softcap=softcap if softcap else None)


def _quack(softcap: float) -> Loss:
    module = importlib.import_module("quack.linear_cross_entropy")

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # the same choice as in quack.linear_cross_entropy.LinearCrossEntropy
        if len(x) % 8 == 0 and len(weight) % 8 == 0 and x.shape[1] % 8 == 0:
            return module.chunked_linear_cross_entropy(x, weight, target, chunk_size=4096)
        return module.linear_cross_entropy_func(x, weight, None, target)

    return loss


BARE = "bare"
PROVIDERS: dict[str, Provider] = {
    # computes no loss, see benchmarks.loss.worker.Bare; this row has its name and position
    BARE: Provider("bare GEMMs", _eager),
    "eager": Provider("eager", _eager),
    "inductor": Provider("inductor", _compiled, compiles=True),
    "auto_chunker": Provider("inductor, `auto_chunker`", _auto_chunker, compiles=True),
    "core": Provider("core's `linear_cross_entropy(options=...)`", _core, softcap=False),
    "liger": Provider(
        "Liger",
        _liger,
        compiles=True,
        package=("liger-kernel", "liger_kernel"),
        gpu=True,
        version="liger-kernel 0.8.5",
    ),
    "cce": Provider(
        "Cut Cross-Entropy",
        _cce,
        compiles=True,
        package=("cut-cross-entropy", "cut_cross_entropy"),
        gpu=True,
        version="cut-cross-entropy 25.1.1",
    ),
    "quack": Provider(
        "QuACK",
        _quack,
        compiles=True,
        package=("quack-kernels", "quack"),
        gpu=True,
        softcap=False,
        version="quack-kernels 0.6.5",
    ),
    "fusedce": Provider("**fusedce**", functools.partial(_fusedce, strategy="auto"), compiles=True),
    "fusedce_chunked": Provider(
        "fusedce, `chunked`", functools.partial(_fusedce, strategy="chunked"), compiles=True
    ),
    "fusedce_tiled": Provider(
        "fusedce, `tiled`", functools.partial(_fusedce, strategy="tiled"), compiles=True
    ),
}
