"""Functions as graphs of ATen's overloads, as torch.export and make_fx trace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

Function = Callable[..., Any]


class _Program(nn.Module):
    """A function as a module, which torch.export takes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def exported(function: Function, *args: Any) -> Function:
    return torch.export.export(_Program(function), args).module()


def decomposed(function: Function, *args: Any) -> Function:
    return torch.export.export(_Program(function), args).run_decompositions().module()


def traced(function: Function, *args: Any) -> Function:
    return make_fx(function)(*args)


def traced_before_autograd(function: Function, *args: Any) -> Function:
    return make_fx(function, pre_dispatch=True)(*args)
