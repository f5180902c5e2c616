"""What a compiled graph makes beside the operators: tensors of the logits' size, and graph breaks.

In: a program that is compiled and run. Out: :func:`listed` collects what its graphs make in forward,
as the backend ``aot_eager`` runs them::

    with listed(large=1552) as found:
        torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})(x)
    found.left, found.breaks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.compiled import break_reason
from fxpass.rewrite import inner


@dataclass
class Graphs:
    large: int
    left: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


@contextmanager
def listed(large: int) -> Iterator[Graphs]:
    """Collects tensors of more than ``large`` elements, each graph's once; and graph breaks."""
    found, compile_inner = Graphs(large), inner.compile_inner

    def compiling(backend: Any, gm: Any, *args: Any, **options: Any) -> Callable[..., Any]:
        reason = break_reason(getattr(gm, "compile_subgraph_reason", None))
        found.breaks += [reason] * bool(reason)
        compiled, seen = compile_inner(backend, gm, *args, **options), False

        def call(*inputs: Any) -> Any:
            nonlocal seen
            if seen:
                return compiled(*inputs)
            seen = True
            with _Large(found, inputs):
                return compiled(*inputs)

        return call

    with mock.patch.object(inner, "compile_inner", compiling):
        yield found


class _Large(TorchDispatchMode):
    """Notes the operation that makes each tensor of the logits' size."""

    supports_higher_order_operators = True

    def __init__(self, found: Graphs, inputs: Any) -> None:
        super().__init__()
        self.found = found
        given = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        # the storages, which have to stay alive
        self.known = {t.untyped_storage()._cdata: t.untyped_storage() for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self.known:  # a view, or written in place
                continue
            self.known[storage._cdata] = storage
            large = storage.nbytes() > self.found.large * tensor.itemsize
            if large and func.namespace != "fxpass":
                packet = getattr(func, "overloadpacket", func)
                self.found.left.append(packet.__name__)
        return made
