"""Programs as graphs of ATen's overloads: traced by torch.export or make_fx before they are compiled.

In: a function and a tracer's name. Out: a function that traces anew for other shapes, numbers or
modes::

    Traced(program, "make_fx", lambda graph: torch.compile(graph, backend="fusedce"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support.traced import Function, exported, traced, traced_before_autograd

TRACERS: Mapping[str, Callable[..., Function]] = {
    "export": exported,
    "make_fx": traced,
    "make_fx before autograd": traced_before_autograd,
}


class Traced:
    """A program that is traced with copies of the arguments of its first call of each kind."""

    def __init__(
        self, program: Function, tracer: str, compiled: Callable[[Function], Function] = lambda f: f
    ) -> None:
        self.program, self.tracer, self.compiled = program, TRACERS[tracer], compiled
        self.graphs: dict[Any, Function] = {}

    def __call__(self, *args: Any) -> Any:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        key = (*modes, torch.is_inference_mode_enabled(), *map(_kind, args))
        if key not in self.graphs:
            state = torch.get_rng_state()
            self.graphs[key] = self.compiled(self.tracer(self.program, *map(_copy, args)))
            torch.set_rng_state(state)
        return self.graphs[key](*args)


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.dtype, argument.requires_grad
    return argument


def _copy(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)
