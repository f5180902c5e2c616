"""Finds compiled callables that a function, which is not compiled itself, may call.

In: a callable and the arguments of a call. Out: whether the callable is compiled, or can reach a
compiled callable: an argument, a global variable, or an attribute of these::

    def loss_of(batch):
        return F.cross_entropy(model(batch["ids"]).logits.flatten(0, 1), batch["labels"].flatten())

    model.compile(backend="fusedce")
    reaches_compiled(loss_of, batch)  # True
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

# Libraries have compiled functions that few calls reach.
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(p), "") for p in ("purelib", "platlib", "stdlib")
)

# At most this many objects are searched, the nearest first: a program may reach all objects of its
# process.
_MOST = 2000

Names = frozenset[str]
_NO_NAMES: Names = frozenset()


def is_compiled(fn: Any) -> bool:
    """True if a call of ``fn`` runs code of ``torch.compile``."""
    if isinstance(fn, torch.nn.Module):
        return isinstance(fn, OptimizedModule) or fn._compiled_call_impl is not None
    if not isinstance(fn, FunctionType | MethodType):
        return False
    return hasattr(fn, "_torchdynamo_orig_callable") and not hasattr(fn, "_torchdynamo_disable")


def reaches_compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """True if ``fn(*args, **kwargs)`` can reach a compiled callable, by the names in its code and
    in the code of functions that it names; a library's code is read only if ``fn`` is part of it.
    """
    first: Any = fn
    if not isinstance(fn, FunctionType | MethodType | partial):
        first = fn.forward if isinstance(fn, torch.nn.Module) else fn.__call__
    function = getattr(first, "__func__", first)
    names = _names(getattr(function, "__code__", None))
    arguments = (getattr(first, "__self__", None), *args, *kwargs.values())
    nearest = deque((argument, names) for argument in arguments)
    nearest += _read_by(function) if isinstance(function, FunctionType) else [(function, names)]
    # holds the objects: the id of a freed object may become another's
    seen: dict[tuple[int, Names], Any] = {}
    while nearest and len(seen) < _MOST:
        target, names = nearest.popleft()
        if is_compiled(target):
            return True
        if (id(target), names) not in seen:
            seen[id(target), names] = target
            nearest += _held_by(target, names)
    return False


def _held_by(holder: Any, names: Names) -> Iterator[tuple[Any, Names]]:
    """The objects that code with these names reaches through an object, each with its names."""
    if isinstance(holder, Mapping):
        yield from ((value, names) for value in holder.values())
    elif isinstance(holder, list | tuple | set):
        yield from ((value, names) for value in holder)
    elif isinstance(holder, partial):
        values = (holder.func, *holder.args, *holder.keywords.values())
        yield from ((value, names) for value in values)
    elif isinstance(holder, MethodType):
        yield holder.__func__, names
        yield holder.__self__, _names(getattr(holder.__func__, "__code__", None))
    elif isinstance(holder, FunctionType):
        if not holder.__code__.co_filename.startswith(_LIBRARIES):
            yield from _read_by(holder)
    elif not isinstance(holder, torch.Tensor | type):
        if isinstance(holder, torch.nn.Module):
            yield from ((module, _NO_NAMES) for module in holder.children())
        own = getattr(holder, "__dict__", {})
        for name in names:
            found = own[name] if name in own else inspect.getattr_static(type(holder), name, None)
            yield MethodType(found, holder) if inspect.isfunction(found) else found, names


def _read_by(fn: FunctionType) -> Iterator[tuple[Any, Names]]:
    """The closures, defaults and global variables that the code of a function reads."""
    names = _names(fn.__code__)
    values = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    values += [fn.__globals__[name] for name in names & fn.__globals__.keys()]
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            values.append(cell.cell_contents)
    yield from ((value, names) for value in values)


def _names(code: CodeType | None) -> Names:
    """The names of global variables and attributes in a function's code, and in functions in it."""
    if code is None:
        return _NO_NAMES
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)
