"""Hides deferred logits from Dynamo: it traces no code of this package, and gets plain tensors.

In: functions, and a class of tensors with a property ``plain``. Out: the same; Dynamo does not
trace them, and passes the tensors to its graphs as plain tensors::

    loss, logits = step(batch)  # deferred logits
    torch.compile(accuracy)(logits, labels)  # the compiled graph is called with logits.plain
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import SkipFrame
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fxpass import messages

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=type)


def hidden(function: F) -> F:
    """The function, which Dynamo does not trace: a frame that calls it has a graph break there."""
    disable: Any = torch.compiler.disable  # its result has no signature
    return disable(function)


def opaque(cls: T) -> T:
    """The class with methods that Dynamo does not trace, also where the dispatcher or autograd
    calls them from a compiled frame."""
    for name, member in list(vars(cls).items()):
        if name == "__new__":
            continue  # its callers are hidden, or compiled code
        if isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(hidden(member.__func__)))
        elif isinstance(member, property):
            get = member.fget
            put = member.fset
            setattr(cls, name, property(get and hidden(get), put and hidden(put)))
        elif inspect.isfunction(member):
            member.__name__ = name  # Dynamo looks up by this name which method of torch it replaces
            setattr(cls, name, hidden(member))
    return cls


def plain_in_graphs(cls: type[Tensor]) -> None:
    """Makes Dynamo pass ``t.plain`` to a graph that reads a tensor ``t`` of this class."""
    for numpy in (False, True):
        VariableBuilder._type_dispatch_impl(numpy)[cls] = _graph_input


def _graph_input(builder: VariableBuilder, t: Any) -> VariableTracker:
    """The variable that Dynamo traces for ``t``."""
    tx: Any = builder.tx
    name = getattr(tx.output.compiler_fn, "compiler_name", "")
    if name == "fusedce" and t.answers and not (tx.one_graph or tx.error_on_graph_break):
        # the frame runs without Dynamo: functions of the logits are answered there
        raise SkipFrame(messages.SKIPPED_FRAME)
    source = builder.get_source()
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    # the first use may be inside a transform of torch.func, and the values are of no level
    with temporarily_clear_interpreter_stack():
        plain = t.plain
    variable = VariableBuilder(builder.tx, AttrSource(source, "plain"))(plain)
    variable.source = source  # for what is not in the graph: its hooks, its gradient, a return
    return variable
