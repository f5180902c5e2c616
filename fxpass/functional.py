"""Fused losses by name, for code that is not compiled; in compiled code they are plain PyTorch.

In: hidden states, the head's weight, targets. Out: a loss, or log-probabilities, without logits::

    from fxpass import linear_cross_entropy

    loss = linear_cross_entropy(hidden, head.weight, labels)

Each is a linear and a function of :mod:`torch.nn.functional`. In ``torch.compile`` the backend sees
these two. In eager they are a program of their own, which the pass on the joint graph compiles.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext, detect_fake_mode

from fxpass import messages
from fxpass.rows.backend import RowsPass
from fxpass.settings import Settings

__all__ = ["linear_cross_entropy", "linear_log_probs"]

_numbers = itertools.count()


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias`` in the classes of the last
    dimension.

    The names are those of ``torch.nn.functional.linear_cross_entropy``. Under autocast the operands
    of the linear are cast. In eager it reads the setting ``FUSEDCE_MEMORY_MB``, and a first call
    compiles; no other setting has an effect there.

    Args:
        input: ``[..., D]`` hidden states, floating point.
        linear_weight: ``[V, D]``, of the same dtype, or of any under autocast.
        target: ``[...]`` class indices, or ``[..., V]`` probabilities.
        linear_bias: ``[V]``.
        weight: ``[V]`` class weights.
        reduction, ignore_index, label_smoothing: as in ``torch.nn.functional.cross_entropy``.

    Returns:
        The loss, f32 (f64 for f64 operands): a scalar, or ``[...]`` for ``none``.

    Raises:
        ValueError, RuntimeError, IndexError: as ``torch.nn.functional.cross_entropy`` does.
    """
    tensors = (input, linear_weight, linear_bias, target, weight)
    return _fused(_cross_entropy, tensors, reduction, ignore_index, label_smoothing)


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probability of each target, as policy losses read it.

    Args:
        input, linear_weight, linear_bias: as of :func:`linear_cross_entropy`.
        target: ``[...]`` class indices.
        temperature: by which logits are divided, positive.

    Returns:
        ``[...]``, f32 (f64 for f64 operands).

    Raises:
        ValueError: the temperature is no positive number.
        RuntimeError: operands do not fit together, or a class does not exist.
    """
    if not isinstance(temperature, int | float) or not temperature > 0:
        raise ValueError(messages.TEMPERATURE.format(value=temperature))
    return _fused(_log_probs, (input, linear_weight, linear_bias, target), temperature)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(x, weight, bias)
    return logits if logits.dtype == torch.float64 else logits.float()


def _cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    logits = _logits(x, weight, bias)
    logits = logits.reshape(-1, logits.shape[-1])
    if class_weight is not None:
        class_weight = class_weight.to(logits.dtype)
    indices = not target.is_floating_point()
    rows = target.flatten().long() if indices else target.reshape(logits.shape).to(logits.dtype)
    options: Any = {"label_smoothing": label_smoothing, "reduction": reduction}
    loss = F.cross_entropy(logits, rows, class_weight, ignore_index=ignore_index, **options)
    return loss.view(x.shape[:-1]) if reduction == "none" else loss


def _log_probs(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> Tensor:
    logits = _logits(x, weight, bias) / temperature
    return logits.log_softmax(-1).gather(-1, target.long().unsqueeze(-1)).squeeze(-1)


def _fused(
    function: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], *options: Any
) -> Tensor:
    """The function's result: traced by a surrounding compiler, or computed by a program."""
    if torch.compiler.is_compiling() or detect_fake_mode(tensors) is not None:  # traced by others
        return function(*tensors, *options)
    return _program(function, options, Settings.read().memory_mb)(*tensors)


@functools.lru_cache(maxsize=256)
def _program(
    function: Callable[..., Tensor], options: tuple[Any, ...], memory_mb: int
) -> Callable[..., Tensor]:
    def loss(*tensors: Tensor | None) -> Tensor:
        return function(*tensors, *options)

    return compiled_alone(loss, memory_mb)


def compiled_alone(loss: Callable[..., Tensor], memory_mb: int) -> Callable[..., Tensor]:
    """A function of tensors, compiled by the pass alone, for any number of rows."""
    inner = RowsPass(memory_mb=memory_mb).backend()

    def backend(module: Any, inputs: Any) -> Any:
        made = inner(module, inputs)
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # backward may run twice
        return made

    # each program may be compiled for several sizes: Dynamo counts compilations by code object
    code = loss.__code__.replace(co_name=f"loss_{next(_numbers)}")
    own = FunctionType(code, loss.__globals__, code.co_name, None, loss.__closure__)
    return torch.compile(own, backend=backend)
