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

from fxpass.rows.rules import VIEWS, A, Env, NodePlan, Ref, Rules, fit
from fxpass.rows.sizes import hint, is_one, is_tensor, key, numel, packet, shape, value
from fxpass.rows.tags import Tag, View

PRODUCTS = {A.mm, A.addmm, A.bmm, A.baddbmm}
# What relates the classes of a row.
RELATING = {A._softmax, A._log_softmax, A.logsumexp, A.sum, A.mean, A.amax, A.amin, A.argmax}
RELATING |= {A.argmin, A.max, A.min, A.sort, A.topk, A.cumsum, A.cumprod, A.logcumsumexp}
RELATING |= {A.cummax, A.cummin, A.gather, A.any, A.all, A.prod, A.var, A.var_mean, A.median}
RELATING |= {A.linalg_vector_norm}
MIB = 1 << 20
# Parts of the least logits that a tile of the vocabulary may be.
PARTS = 8


@dataclass(frozen=True)
class Head:
    """A product that makes logits.

    Attributes:
        node: the product.
        x, weight: its factors.
        bias: of ``addmm``.
        first: whether classes come first.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    first: bool

    @property
    def classes(self) -> int:
        return hint(shape(self.node)[-2 if self.first else -1])

    @property
    def rows(self) -> Any:
        """The number of rows."""
        sizes = list(shape(self.node))
        sizes.pop(-2 if self.first else -1)
        return tuple(map(key, sizes))

    @property
    def hidden(self) -> int:
        return hint(shape(self.x)[-2 if self.first else -1])

    def plan(self) -> NodePlan | None:
        """How the product runs on a chunk; None for a batch with several weights."""
        x = self.x
        weight = self.weight
        if packet(self.node) is A.bmm:
            return self._batched()
        view = View(key(shape(x)[1 if self.first else 0]))
        tag = Tag("cr" if self.first else "rc", view)
        of_x = Ref("row", x, "kr" if self.first else "rk", (1 if self.first else 0,), view)
        refs = [of_x, Ref("shared", weight, "kk")]
        if self.bias is not None:
            refs.append(self._of_bias(self.bias, view))

        def run(env: Env) -> Tensor:
            matrix = env.shared(refs[1])
            rows = env.get(refs[0])
            matrix = matrix.t() if self.first else matrix
            if len(refs) < 3:
                return torch.mm(rows, matrix)
            if not self.first:  # rounded once
                return torch.addmm(env.shared(refs[2]), rows, matrix)
            return torch.mm(rows, matrix) + fit(env.get(refs[2]), refs[2].letters, tag.letters)

        return NodePlan(tag, refs, run)

    def _of_bias(self, bias: Node, view: View) -> Ref:
        """The operand for a bias: of classes; or of rows, where classes come first."""
        last = len(shape(bias)) - 1
        if self.first and last >= 0 and not is_one(shape(bias)[last]):
            return Ref("row", bias, "k" * last + "r", (last,), view)
        return Ref("shared", bias, "k" * (last + 1))

    def _batched(self) -> NodePlan | None:
        """``[B, T, D] @ [D, V]``, where the matrix is the same for the whole batch."""
        many = value(self.weight)
        one = is_one(shape(self.node)[0])
        if self.first or not (one or many.stride(0) == 0):
            return None
        b, t = map(key, shape(self.node)[:2])
        view = View(t) if one else View(b * t).reshape((b, t))
        tag = Tag("krc" if one else "rrc", view)
        letters = "krk" if one else "rrk"
        x = Ref("row", self.x, letters, tag.rows, view)
        refs = [x, Ref("shared", self.weight, "kkk")]

        def run(env: Env) -> Tensor:
            return torch.matmul(env.get(refs[0]), env.shared(refs[1])[0])

        return NodePlan(tag, refs, run)


def heads(graph: Graph, later: set[Node], least_mb: float, first: bool) -> list[Head]:
    """The products that may be heads, those of ``later`` (backward) left out.

    Args:
        least_mb: the size of logits, in MiB, that are worth a loop; 0: all are.
        first: whether classes come first.
    """
    multiplied = [
        n
        for n in graph.nodes
        if n.op == "call_function" and packet(n) in PRODUCTS - {A.baddbmm} and is_tensor(n)
    ]
    found = []
    for node in multiplied:
        if node in later or numel(shape(node)) == 0:
            continue
        if _bytes(node) * PARTS < least_mb * MIB:
            continue
        if (head := _head(node, first)) is not None:
            found.append(head)
    most = max((numel(head.rows) for head in found), default=0)
    found = [head for head in found if numel(head.rows) > 1 or most == 1]  # of one row: an operand
    wide = [head for head in found if head.classes > head.hidden]
    ends = [head for head in wide or found if not _is_multiplied(head, later)]
    return ends or [head for head in wide or found if _is_reduced(head, later)]


def may_have_heads(graph: Graph, least_mb: float) -> bool:
    """Whether there is a product of the size of logits."""
    found = (n for n in graph.nodes if n.op == "call_function" and packet(n) in PRODUCTS)
    return any(_bytes(n) * PARTS >= least_mb * MIB for n in found)


def products(graph: Graph, least_mb: float) -> list[Node]:
    """The products ``[N, V]`` that may be heads."""
    found = heads(graph, backward_of(tangents(graph), graph), least_mb, False)
    return [head.node for head in found if packet(head.node) in (A.mm, A.addmm)]


def tangents(graph: Graph) -> list[Node]:
    """The tensors that backward starts with."""
    return [n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]


def _head(node: Node, first: bool) -> Head | None:
    a, b = node.args[-2:]
    bias = node.args[0] if packet(node) is A.addmm else None
    if packet(node) is A.addmm and any(v != 1 for v in node.kwargs.values()):
        return None
    x, weight = (b, a) if first else (a, b)
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    if value(x).dtype != value(weight).dtype:  # fake tensors multiply what kernels refuse
        return None
    return Head(node, x, weight, bias if isinstance(bias, Node) else None, first)


def _bytes(node: Node) -> int:
    return numel(shape(node)) * value(node).dtype.itemsize


def _is_reduced(head: Head, later: set[Node]) -> bool:
    """Whether forward relates the classes of a row, as a softmax does, before the next product: of
    a hidden layer, it computes each value by itself."""
    seen = set[Node]()
    todo = [head.node]
    while todo:
        for user in todo.pop().users:
            if packet(user) in RELATING and user not in later:
                return True
            by_itself = torch.Tag.pointwise in getattr(user.target, "tags", ())
            if user not in seen and user not in later and (by_itself or packet(user) in VIEWS):
                seen.add(user)
                todo.append(user)
    return False


def _is_multiplied(head: Head, later: set[Node]) -> bool:
    """Whether forward makes hidden states of its results, as of those of hidden layers."""
    hidden = min(numel(shape(head.x)), numel(shape(head.weight)))
    seen = set[Node]()
    todo = [head.node]
    while todo:
        for user in todo.pop().users:
            if user in seen or user in later:
                continue
            if packet(user) in PRODUCTS and 2 * numel(shape(user)) >= hidden:
                return True
            seen.add(user)
            todo.append(user)
    return False


def reading(tangent: Node, graph: Graph) -> set[Node]:
    """A tangent, and what is computed from it."""
    found = {tangent}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def backward_of(tangents: Iterable[Node], graph: Graph) -> set[Node]:
    """The nodes that read a tangent, and those of gradients that are 0 whatever it is."""
    found = set(tangents)
    for node in graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if backward or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def seeded(rules: Rules, found: list[Head]) -> list[Head]:
    """Plans the heads; returns those that have a plan."""
    kept = []
    for head in found:
        plan = head.plan()
        if plan is not None:
            rules.plans[head.node] = plan
            kept.append(head)
    return kept
