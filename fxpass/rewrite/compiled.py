"""Whether a function that is not compiled calls what ``torch.compile`` has compiled.

In: a callable and the arguments of a call. Out: whether it is compiled, or can reach what is: a
model that it is given, that is a global variable, or that an object holds which it reads::

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

# libraries have compiled functions that few calls reach
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(p), "") for p in ("purelib", "platlib", "stdlib")
)

# Objects that are looked at, the nearest first: a program may reach all objects of its process.
_MOST = 2000

Names = frozenset[str]
_NO_NAMES: Names = frozenset()


def is_compiled(fn: Any) -> bool:
    """Whether a call of ``fn`` runs what ``torch.compile`` has made of it."""
    if isinstance(fn, torch.nn.Module):
        return isinstance(fn, OptimizedModule) or fn._compiled_call_impl is not None
    if not isinstance(fn, FunctionType | MethodType):
        return False
    return hasattr(fn, "_torchdynamo_orig_callable") and not hasattr(fn, "_torchdynamo_disable")


def reaches_compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether ``fn(*args, **kwargs)`` can reach a compiled callable, by the names in its code and
    in that of functions that it names; the code of libraries is read only if ``fn`` is in one."""
    first: Any = fn
    if not isinstance(fn, FunctionType | MethodType | partial):
        first = fn.forward if isinstance(fn, torch.nn.Module) else fn.__call__
    function = getattr(first, "__func__", first)
    names = _names(getattr(function, "__code__", None))
    todo = [(one, names) for one in (getattr(first, "__self__", None), *args, *kwargs.values())]
    todo += _read_by(function) if isinstance(function, FunctionType) else [(function, names)]
    # with the objects: the id of one that is freed becomes another's
    seen: dict[tuple[int, Names], Any] = {}
    nearest = deque(todo)
    while nearest and len(seen) < _MOST:
        one, names = nearest.popleft()
        if is_compiled(one):
            return True
        if (id(one), names) not in seen:
            seen[id(one), names] = one
            nearest += _held_by(one, names)
    return False


def _held_by(one: Any, names: Names) -> Iterator[tuple[Any, Names]]:
    """The objects that code with these names reaches through an object, each with its names."""
    if isinstance(one, Mapping):
        yield from ((value, names) for value in one.values())
    elif isinstance(one, list | tuple | set):
        yield from ((value, names) for value in one)
    elif isinstance(one, partial):
        yield from ((value, names) for value in (one.func, *one.args, *one.keywords.values()))
    elif isinstance(one, MethodType):
        yield one.__func__, names
        yield one.__self__, _names(getattr(one.__func__, "__code__", None))
    elif isinstance(one, FunctionType):
        if not one.__code__.co_filename.startswith(_LIBRARIES):
            yield from _read_by(one)
    elif not isinstance(one, torch.Tensor | type):
        if isinstance(one, torch.nn.Module):
            yield from ((module, _NO_NAMES) for module in one.children())
        held = getattr(one, "__dict__", {})
        for name in names:
            found = held[name] if name in held else inspect.getattr_static(type(one), name, None)
            yield MethodType(found, one) if inspect.isfunction(found) else found, names


def _read_by(fn: FunctionType) -> Iterator[tuple[Any, Names]]:
    """The values of closures, defaults and global variables that the code of a function reads."""
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
