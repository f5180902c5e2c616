"""Row regions whose gradients forward computes: their outputs have coefficients known before.

In: a call of ``fxpass::row_region`` in a graph. Out: the same call with the coefficients of a
total, if all gradients of its outputs pass one scalar, and the gradient of this scalar by the
outputs reads none of them. Nobody has to know what the nodes between compute: autograd says it::

    %rows = getitem(%out, 0)                    %coefs = coefficients(%zeros, %mask)
    %masked = mul(%rows, %mask)          ->     %out = row_region([..., %coefs[0]], '... total=1')
    %loss = sum(%masked)                        %loss = add(getitem(%out, 1), %coefs[-1])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxpass.graph.calls import storage, written
from fxpass.graph.functions import reads_values
from fxpass.graph.nodes import is_tensor, needs_gradient, value
from fxpass.region.text import RowRegion

Make = Callable[..., Node]  # a call of a function → a new node


@dataclass(frozen=True)
class Known:
    """A total whose gradients forward can compute.

    Attributes:
        node: the scalar.
        tail: the nodes between the outputs and the scalar, and the scalar.
        results: the outputs that have a gradient, then the others that the tail reads.
        others: what the tail reads beside them.
    """

    node: Node
    tail: tuple[Node, ...]
    results: tuple[Node, ...]
    others: tuple[Node, ...]


def known_total(
    outputs: Sequence[Node], results: Collection[Node], grads: Mapping[Node, bool]
) -> Known | None:
    """The total of the outputs of a call that have a gradient; None if there is none.

    Args:
        outputs: the outputs that have a gradient.
        results: all outputs.
        grads: whether gradients are enabled at a node.
    """
    after = _differentiable(outputs, grads)
    scalars = [n for n in after if is_tensor(n) and not value(n).dim()]
    node = next((n for n in sorted(scalars) if _passes(outputs, n, after)), None)
    if node is None or node in outputs or not value(node).is_floating_point():
        return None
    tail = _between(outputs, node, after)
    inside = {*tail, *outputs}
    others = tuple(dict.fromkeys(n for t in tail for n in t.all_input_nodes if n not in inside))
    if any(storage(n) not in _storages(tail) for t in tail for n in written(t)):
        return None
    read = (*outputs, *(n for n in others if n in results))
    found = Known(node, tail, read, tuple(n for n in others if n not in results))
    return found if _is_linear(found, len(outputs)) else None


def _storages(nodes: Collection[Node]) -> set[int | None]:
    return {storage(n) for n in nodes if is_tensor(n)}


def _differentiable(outputs: Sequence[Node], grads: Mapping[Node, bool]) -> set[Node]:
    """The nodes that gradients of the outputs may come from."""
    found, todo = set(outputs), list(outputs)
    while todo:
        node = todo.pop()
        for user in node.users:
            enabled = grads.get(user, True) and getattr(user.target, "__name__", "") != "detach"
            floats = not is_tensor(user) or value(user).is_floating_point()
            if user not in found and enabled and floats and user.target != "detach":
                if user.op != "output" and not reads_values(user, node):
                    continue
                found.add(user)
                todo.append(user)
    return found


def _passes(outputs: Sequence[Node], node: Node, after: set[Node]) -> bool:
    """Whether every way from the outputs to the end of the graph passes a node."""
    seen, todo = {node, *outputs}, list(outputs)
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or (user in after and not user.users and user is not node):
                return False
            if user in after and user not in seen:
                seen.add(user)
                todo.append(user)
    return True


def _between(outputs: Sequence[Node], node: Node, after: set[Node]) -> tuple[Node, ...]:
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in after and source not in found and source not in outputs:
                found.add(source)
                todo.append(source)
    return tuple(sorted(found))


def _tail(known: Known) -> Callable[..., Tensor]:
    """A function of the results and the others to the scalar."""
    graph = Graph()
    copies = {n: graph.placeholder(n.name) for n in (*known.results, *known.others)}
    for node in known.tail:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[known.node])
    module = GraphModule(torch.nn.Module(), graph)

    def scalar(*tensors: Any) -> Tensor:
        return module(*tensors)

    return scalar


def _coefficients(known: Known, count: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function of zeros for the results, and of the others, to the derivatives of the scalar by
    the first results."""
    scalar = _tail(known)

    def coefficients(*tensors: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad(), compiled_autograd._disable():
            leaves = [t.detach().clone().requires_grad_() for t in tensors[:count]]
            whole = scalar(*leaves, *tensors[count:])
            return torch.autograd.grad(whole, leaves, materialize_grads=True)

    return coefficients


def _is_linear(known: Known, count: int) -> bool:
    """Whether the coefficients read none of the results, nothing else that has a gradient, and no
    random numbers."""
    examples = [n.meta.get("example_value") for n in (*known.results, *known.others)]
    try:
        with torch.no_grad():
            traced = make_fx(_coefficients(known, count))(*examples)
    except Exception:
        return False
    given = (*known.results, *known.others)
    inputs = zip(traced.graph.find_nodes(op="placeholder"), given, strict=True)
    places = {p for p, n in inputs if n in known.results or needs_gradient(n)}
    returned: Any = traced.graph.output_node().args[0]
    coefs = [c for c in returned if isinstance(c, Node)]
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


def _reads_metadata(node: Node) -> bool:
    name = str(node.target)
    return any(word in name for word in ("_like", "new_", "sym_size", "sym_numel"))


def with_total(graph: Graph, call: Node, grads: Mapping[Node, bool], make: Make) -> Node | None:
    """The call in the place of a call whose gradients forward can compute; None if it cannot.

    Args:
        graph: the graph, which is changed.
        call: of ``fxpass::row_region``.
        grads: whether gradients are enabled at a node.
        make: makes a node with its example value at the graph's insertion point.
    """
    tensors, text = call.args
    region = RowRegion.parse(str(text))
    results = {int(n.args[1]): n for n in call.users}  # type: ignore[arg-type]
    if region.total or not region.tangents or set(region.tangents) - results.keys():
        return None
    outputs = [results[i] for i in region.tangents]
    known = known_total(outputs, results.values(), grads)
    if known is None:
        return None
    place = _place(call, known, list(results.values()))
    if place is None:
        return None
    with graph.inserting_before(place):
        rows = make(torch.ops.aten.sym_size.int, tensors[0], 0)  # type: ignore[index]
        zeros = []
        for result in known.results:
            sizes = [rows, *value(result).shape[1:]]
            of = tensors[0], sizes  # type: ignore[index]
            zeros.append(make(torch.ops.aten.new_zeros.default, *of, dtype=value(result).dtype))
        found = make(_coefficients(known, len(outputs)), *zeros, *known.others)
        coefs = [make(operator.getitem, found, i) for i in range(len(outputs))]
        text = replace(region, total=True).text()
        new = make(call.target, [*tensors, *coefs], text)  # type: ignore[misc]
        news = {old: make(operator.getitem, new, i) for i, old in results.items()}
        total = make(operator.getitem, new, region.outputs)
        read = [news[n] for n in known.results[len(outputs) :]]
        # what else is in the scalar may have gradients of its own
        rest = make(_tail(known), *zeros[: len(outputs)], *read, *known.others)
        total = make(torch.add, make(torch.Tensor.to, total, value(known.node).dtype), rest)
        for old, node in news.items():
            old.replace_all_uses_with(node)
    if place is known.node:
        for node in known.tail[:-1]:  # some may be read after the total, too
            place.prepend(node)
    example = known.node.meta["example_value"]
    known.node.replace_all_uses_with(total)
    total.meta["example_value"] = example
    for node in (*reversed(known.tail), *results.values(), call):
        if not node.users:
            graph.erase_node(node)
    return new


def _place(call: Node, known: Known, results: Sequence[Node]) -> Node | None:
    """The node before which the call can stand: after what the tail reads, before all else that
    reads its results, with no write to its operands on the way."""
    before = (*results, *known.tail[:-1])
    readers = [u for n in before for u in n.users if u not in known.tail]
    last = max([call, *known.others])
    place = known.node
    if any(reader < place for reader in readers):
        place = call if last is call else None
    if place is None or place is call:
        return place
    memory = _storages(call.args[0])  # type: ignore[arg-type]
    node = call
    while node is not place:
        if any(storage(n) in memory for n in written(node)):
            return None
        node = node.next
    return place
