"""The products of a joint graph that may be heads.

In: a graph. Out: the products of forward whose results are reduced, with the tags of their rows::

    mm(x [N, D], weightᵀ [D, V])        logits [N, V], tagged "rc"
    mm(weight [V, D], xᵀ [D, N])        logits [V, N], tagged "cr", where classes are first
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass.rows.aten_calls import VIEWS, A
from fxpass.rows.canonical import align
from fxpass.rows.rules import Env, NodePlan, Ref, Rules
from fxpass.rows.sizes import example, is_one, key, numel, packet, shape, size_hint
from fxpass.rows.tags import Tag, View

PRODUCTS = {A.mm, A.addmm, A.bmm, A.baddbmm}
# Operations that relate the classes of a row.
_RELATING = {A._softmax, A._log_softmax, A.logsumexp, A.sum, A.mean, A.amax, A.amin, A.argmax}
_RELATING |= {A.argmin, A.max, A.min, A.sort, A.topk, A.cumsum, A.cumprod, A.logcumsumexp}
_RELATING |= {A.cummax, A.cummin, A.gather, A.any, A.all, A.prod, A.var, A.var_mean, A.median}
_RELATING |= {A.linalg_vector_norm}
_MIB = 1 << 20
_TILES = 8  # a program may compute logits in so many tiles of the vocabulary


@dataclass(frozen=True)
class Head:
    """A product that makes logits.

    Attributes:
        node: the product.
        x, weight: its factors.
        bias: of ``addmm``.
        classes_first: the logits are ``[V, N]``.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    classes_first: bool

    @property
    def classes(self) -> int:
        return size_hint(shape(self.node)[-2 if self.classes_first else -1])

    @property
    def row_sizes(self) -> Any:
        """The sizes of the dimensions of rows."""
        sizes = list(shape(self.node))
        sizes.pop(-2 if self.classes_first else -1)
        return tuple(map(key, sizes))

    @property
    def hidden(self) -> int:
        return size_hint(shape(self.x)[-2 if self.classes_first else -1])

    def plan(self) -> NodePlan | None:
        """The product's plan on a chunk; None for a batch with several weights."""
        if packet(self.node) is A.bmm:
            return self._batched()
        dim = int(self.classes_first)  # of the rows of x
        view = View(key(shape(self.x)[dim]))
        tag = Tag("cr" if self.classes_first else "rc", view)
        x = Ref("row", self.x, "kr" if self.classes_first else "rk", (dim,), view)
        refs = [x, Ref("shared", self.weight, "kk")]
        if self.bias is not None:
            refs.append(self._bias_ref(self.bias, view))

        def run(env: Env) -> Tensor:
            matrix = env.shared(refs[1])
            rows = env.get(refs[0])
            matrix = matrix.t() if self.classes_first else matrix
            if len(refs) < 3:
                return torch.mm(rows, matrix)
            if not self.classes_first:  # rounded once
                return torch.addmm(env.shared(refs[2]), rows, matrix)
            return torch.mm(rows, matrix) + align(env.get(refs[2]), refs[2].letters, tag.letters)

        return NodePlan(tag, refs, run)

    def _bias_ref(self, bias: Node, view: View) -> Ref:
        """The operand for a bias: of classes; or of rows, where classes come first."""
        last = len(shape(bias)) - 1
        if self.classes_first and last >= 0 and not is_one(shape(bias)[last]):
            return Ref("row", bias, "k" * last + "r", (last,), view)
        return Ref("shared", bias, "k" * (last + 1))

    def _batched(self) -> NodePlan | None:
        """The plan of ``[B, T, D] @ [D, V]``: all of a batch have the same matrix."""
        single = is_one(shape(self.node)[0])  # a batch of one product
        if self.classes_first or not (single or example(self.weight).stride(0) == 0):
            return None
        b, t = map(key, shape(self.node)[:2])
        view = View(t) if single else View(b * t).reshape((b, t))
        tag = Tag("krc" if single else "rrc", view)
        letters = "krk" if single else "rrk"
        x = Ref("row", self.x, letters, tag.rows, view)
        refs = [x, Ref("shared", self.weight, "kkk")]

        def run(env: Env) -> Tensor:
            return torch.matmul(env.get(refs[0]), env.shared(refs[1])[0])

        return NodePlan(tag, refs, run)


def find_heads(
    graph: Graph, backward: set[Node], least_mb: float, classes_first: bool
) -> list[Head]:
    """The products of forward that may be heads.

    Args:
        backward: the nodes of backward.
        least_mb: the size of logits, in MiB, that are worth a loop; 0: all are.
        classes_first: the logits are ``[V, N]``.
    """
    heads = []
    for node in graph.nodes:
        if node in backward or not _is_large_product(node, least_mb) or numel(shape(node)) == 0:
            continue
        if packet(node) is not A.baddbmm and (head := _head(node, classes_first)) is not None:
            heads.append(head)
    most = max((numel(head.row_sizes) for head in heads), default=0)
    if most > 1:  # a product of one row is an operand
        heads = [head for head in heads if numel(head.row_sizes) > 1]
    heads = [head for head in heads if head.classes > head.hidden] or heads
    ends = [head for head in heads if not _is_multiplied(head, backward)]
    return ends or [head for head in heads if _is_reduced(head, backward)]


def may_have_heads(graph: Graph, least_mb: float) -> bool:
    """Is true if the graph has a product of the size of logits."""
    return any(_is_large_product(node, least_mb) for node in graph.nodes)


def _is_large_product(node: Node, least_mb: float) -> bool:
    if node.op != "call_function" or packet(node) not in PRODUCTS:
        return False
    return numel(shape(node)) * example(node).dtype.itemsize * _TILES >= least_mb * _MIB


def head_products(graph: Graph, least_mb: float) -> list[Node]:
    """The products ``[N, V]`` that may be heads."""
    found = find_heads(graph, backward_nodes(tangent_inputs(graph), graph), least_mb, False)
    return [head.node for head in found if packet(head.node) in (A.mm, A.addmm)]


def tangent_inputs(graph: Graph) -> list[Node]:
    """The inputs of a joint graph that are tangents of forward's outputs."""
    return [n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]


def _head(node: Node, classes_first: bool) -> Head | None:
    a, b = node.args[-2:]
    bias = node.args[0] if packet(node) is A.addmm else None
    if packet(node) is A.addmm and any(v != 1 for v in node.kwargs.values()):
        return None
    if isinstance(bias, Node) and not classes_first and not all(map(is_one, shape(bias)[:-1])):
        return None  # each row has a bias of its own
    x, weight = (b, a) if classes_first else (a, b)
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    if example(x).dtype != example(weight).dtype:  # fake tensors multiply what kernels refuse
        return None
    return Head(node, x, weight, bias if isinstance(bias, Node) else None, classes_first)


def _is_reduced(head: Head, backward: set[Node]) -> bool:
    """Is true if forward relates the classes of a row, as a softmax does, before the next product.
    The activation of a hidden layer does not: it is elementwise."""
    seen = set[Node]()
    todo = [head.node]
    while todo:
        for user in todo.pop().users:
            if user in backward:
                continue
            if packet(user) in _RELATING:
                return True
            elementwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
            if user not in seen and (elementwise or packet(user) in VIEWS):
                seen.add(user)
                todo.append(user)
    return False


def _is_multiplied(head: Head, backward: set[Node]) -> bool:
    """Is true if forward computes hidden states from the product, as from a hidden layer's."""
    hidden = min(numel(shape(head.x)), numel(shape(head.weight)))
    seen = set[Node]()
    todo = [head.node]
    while todo:
        for user in todo.pop().users:
            if user in seen or user in backward:
                continue
            if packet(user) in PRODUCTS and 2 * numel(shape(user)) >= hidden:
                return True
            seen.add(user)
            todo.append(user)
    return False


def readers_of(tangent: Node, graph: Graph) -> set[Node]:
    """A tangent, and the nodes that depend on it."""
    found = {tangent}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def backward_nodes(tangents: Iterable[Node], graph: Graph) -> set[Node]:
    """The nodes that depend on tangents, and those that AOTAutograd marks as of backward."""
    found = set(tangents)
    for node in graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if backward or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def plan_heads(rules: Rules, heads: list[Head]) -> list[Head]:
    """Plans the heads; returns those that have a plan."""
    plans = {head.node: plan for head in heads if (plan := head.plan()) is not None}
    rules.plans |= plans
    return [head for head in heads if head.node in plans]
