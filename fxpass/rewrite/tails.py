"""The tail of a total: what stands between an operator's outputs and a scalar, and its derivative.

In: a :class:`Known`. Out: the derivative of the scalar by the outputs in ATen, whether it reads
none of them, and its nodes in a graph. Nothing of it runs autograd in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxpass.graph.nodes import is_tensor, needs_gradient, value
from fxpass.spec.dtypes import LOW_PRECISION

Make = Callable[..., Node]  # a call of a function → a new node


@dataclass(frozen=True)
class Known:
    """A total whose gradients forward can compute.

    Attributes:
        node: the scalar.
        tail: the nodes between the outputs and the scalar, and the scalar.
        results: the outputs that have a gradient, then the others that the tail reads.
        others: what the tail reads beside them.
        graph: of results and others, the derivatives of the scalar by the first results, and the
            scalar, in ATen.
    """

    node: Node
    tail: tuple[Node, ...]
    results: tuple[Node, ...]
    others: tuple[Node, ...]
    graph: Graph


def _narrows(node: Node) -> bool:
    """Whether a node is a cast from f32 to 16 bits."""
    cast = node.target is torch.ops.aten._to_copy.default
    source = node.all_input_nodes[0] if cast and node.all_input_nodes else node
    wide = is_tensor(source) and value(source).dtype == torch.float32
    return wide and value(node).dtype in LOW_PRECISION


_CPU = torch.device("cpu")  # where nothing has to be loaded for autograd


def _tail(known: Known) -> GraphModule:
    """A function of the results and the others to the scalar, on the CPU."""
    graph = Graph()
    copies = {n: graph.placeholder(n.name) for n in (*known.results, *known.others)}
    for node in known.tail:
        # to 16 bits, the coefficients would be rounded as the rows: the total is, in the end
        source = node.all_input_nodes[0] if _narrows(node) else None
        copies[node] = copies[source] if source else graph.node_copy(node, copies.__getitem__)
        if not source:
            arguments = copies[node].args, copies[node].kwargs
            moved: Any = pytree.tree_map_only(torch.device, lambda _: _CPU, arguments)
            copies[node].args, copies[node].kwargs = moved
    graph.output(copies[known.node])
    return GraphModule(torch.nn.Module(), graph)


def traced_of(known: Known, count: int) -> Graph | None:
    """The derivatives of the scalar by the first results, and the scalar, in ATen; None if this
    cannot be traced. Nothing of it runs autograd: the graph may be in a checkpoint."""
    given = (*known.results, *known.others)
    examples = [n.meta.get("example_value") for n in given]
    if len({e.device for e in examples if isinstance(e, Tensor) and e.dim()}) > 1:
        return None
    modes = (getattr(example, "fake_mode", None) for example in examples)
    fake = next((mode for mode in modes if mode is not None), None)
    scalar = _tail(known)

    def coefficients(*tensors: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad(), compiled_autograd._disable():
            leaves = [t.detach().clone().requires_grad_() for t in tensors[:count]]
            whole = scalar(*leaves, *tensors[count:])
            return *torch.autograd.grad(whole, leaves, materialize_grads=True), whole

    try:
        with torch.no_grad(), fake or nullcontext():  # autograd makes tensors of numbers
            examples = [_empty(e) if isinstance(e, Tensor) else e for e in examples]
            module = make_fx(coefficients)(*examples)
    except Exception:
        return None
    module.graph.eliminate_dead_code()
    return None if module.graph.find_nodes(op="get_attr") else module.graph


# Functions that are linear in one argument, or in all of them: of others, such as a rounded
# quotient, the derivative may be a constant, too.
_LINEAR = {
    *("add", "sub", "rsub", "mul", "div", "neg", "sum", "mean", "where", "masked_fill", "clone"),
    *("_to_copy", "detach", "alias", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"),
    *("expand", "permute", "transpose", "t", "select", "slice", "split", "unbind", "getitem"),
    *("stack", "cat", "index", "index_select", "gather", "mm", "mv", "dot", "bmm", "addmm", "flip"),
    *("cumsum", "scatter", "scatter_add", "index_add", "repeat", "roll", "constant_pad_nd"),
    *("lift_fresh_copy", "diagonal", "unfold", "narrow", "add_", "sub_", "mul_", "div_"),
}


def _is_affine(known: Known, traced: Graph) -> bool:
    """Whether the scalar is made of the results by linear functions."""
    places = traced.find_nodes(op="placeholder")[: len(known.results)]
    whole: Any = traced.output_node().args[0]
    behind = set(_behind(whole[-1], places)) if isinstance(whole[-1], Node) else set()
    made = set(places)
    for node in traced.nodes:
        if node in behind and not made.isdisjoint(node.all_input_nodes):
            made.add(node)
            packet = getattr(node.target, "overloadpacket", node.target)
            rounds = node.kwargs.get("rounding_mode") is not None
            if packet.__name__ not in _LINEAR or rounds:
                return False
    return True


def is_linear(known: Known, traced: Graph) -> bool:
    """Whether the coefficients read none of the results, nothing else that has a gradient, and no
    random numbers; and the scalar is linear, but for a constant."""
    if not _is_affine(known, traced):
        return False
    given = (*known.results, *known.others)
    inputs = zip(traced.find_nodes(op="placeholder"), given, strict=True)
    places = {p for p, n in inputs if n in known.results or needs_gradient(n)}
    returned: Any = traced.output_node().args[0]
    coefs = [c for c in returned[:-1] if isinstance(c, Node)]
    if places.intersection(coefs):
        return False
    seen, todo = set(coefs), list(coefs)
    while todo:
        node = todo.pop()
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            return False
        if _reads_metadata(node):
            continue
        for source in node.all_input_nodes:
            if source in places:
                return False
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return True


# What makes leaves of zeros, for autograd.
_OF_LEAVES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Copies:
    """Copies nodes of a traced graph into a graph, each when it is asked for."""

    def __init__(
        self, traced: Graph, given: Sequence[Any], count: int, make: Make, device: Any
    ) -> None:
        self.places = traced.find_nodes(op="placeholder")
        self.known: dict[Node, Any] = dict(zip(self.places, given, strict=True))
        self.make, self.device = make, device
        self.results: Any = traced.output_node().args[0]
        self.leaves = set(self.places[:count])

    def __call__(self, node: Any) -> Any:
        for one in _behind(node, self.known):
            args, kwargs = map_arg((one.args, one.kwargs), self.known.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": self.device}
            kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "layout")}
            leaf = one.target in _OF_LEAVES and one.all_input_nodes[0] in self.leaves
            self.leaves |= {one} if leaf else set()
            self.known[one] = args[0] if leaf else self.make(one.target, *args, **kwargs)
        return self.known[node]


def _behind(node: Node, known: Collection[Node]) -> list[Node]:
    """The nodes that a node needs, and itself, in order, without those that are known."""
    found, todo = set[Node](), [node]
    while todo:
        one = todo.pop()
        if one not in found and one not in known:
            found.add(one)
            todo += one.all_input_nodes
    return sorted(found)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=_CPU)


def _reads_metadata(node: Node) -> bool:
    name = str(node.target)
    return any(word in name for word in ("_like", "new_", "sym_size", "sym_numel"))
