"""What a rewritten graph makes beside the operator: tensors of the logits' size, and graph breaks.

In: the name of an inner backend. Out: :func:`counting`, a backend that runs each graph once by itself,
and lists its large tensors; :func:`listed` collects them::

    with listed(large=1552) as found:
        torch.compile(program, backend="fusedce", options={"fusedce.inner": COUNTING["eager"]})(x)
    found.left, found.breaks
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends import registry
from torch.utils import _pytree as pytree

from benchmarks.compiled import break_reason

COUNTING = {inner: f"tests_counting_{inner}" for inner in ("eager", "aot_eager", "inductor")}
# of a nested graph, its first argument
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# of a nested graph, its name and its arguments
INVOKE = torch.ops.higher_order.invoke_subgraph


@dataclass
class Graphs:
    large: int
    left: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


_listening: list[Graphs] = []


@contextmanager
def listed(large: int) -> Iterator[Graphs]:
    """Collects what :func:`counting` sees: tensors of more than ``large`` elements."""
    found = Graphs(large)
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.remove(found)


def counting(inner: str) -> Callable[..., Any]:
    """A backend that runs each graph once by itself, and lists its tensors of the logits' size."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph = copy.deepcopy(gm)
        graph.graph.eliminate_dead_code()  # as AOTAutograd does
        reason = break_reason(getattr(gm, "compile_subgraph_reason", None))
        for found in _listening:
            found.breaks += [reason] * bool(reason)
        compiled = registry.lookup_backend(inner)(gm, inputs)
        seen = False

        def call(*args: Any) -> Any:
            nonlocal seen
            if not seen and _listening:
                seen = True
                state = torch.get_rng_state()
                sizes = _Large(graph, _listening[-1].large)
                sizes.run(*(a.detach().clone() if isinstance(a, Tensor) else a for a in args))
                torch.set_rng_state(state)
                _listening[-1].left += sizes.names
            return compiled(*args)

        return call

    return backend


class _Large(fx.Interpreter):
    """Runs a graph; ``names`` has the function that makes each tensor of the logits' size."""

    def __init__(self, gm: fx.GraphModule, large: int, outer: _Large | None = None) -> None:
        super().__init__(gm)
        self.large = large
        self.names: list[str] = outer.names if outer else []
        # the storages, which have to stay alive
        self.known: dict[int, Any] = outer.known if outer else {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is CHECKPOINT:
            nested, *inputs = args
            return _Large(nested, self.large, self).run(*inputs)
        if target is INVOKE:
            nested, _, *inputs = args
            return _Large(nested, self.large, self).run(*inputs)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        for tensor in pytree.tree_leaves(made):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self.known:  # a view, or written in place
                continue
            self.known[storage._cdata] = storage
            large = storage.nbytes() > self.large * tensor.itemsize
            if large and n.op not in ("placeholder", "get_attr") and not _operator(n):
                self.names.append(_short(n))
        return made


def _operator(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "fxpass"


def _short(node: fx.Node) -> str:
    """``log_softmax`` for the function, method or operator of that name."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


for _inner, _name in COUNTING.items():
    if _name not in registry._COMPILER_FNS:
        registry.register_backend(counting(_inner), name=_name)
