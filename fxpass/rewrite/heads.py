"""Products of Dynamo's graph that look like heads: their sizes, and the readers of their results.

In: a node of a Dynamo graph. Out: whether its output may be logits that are worth a loop
(``FUSEDCE_MIN_LOGITS_MB``; 0 fuses all), and whether it is a hidden layer::

    linear(%h [4096, 2048], %w [128256, 2048])    1.05 GB of bf16 logits: a head
    linear(%h [4096, 2048], %w [8192, 2048])      multiplied by the next product: a hidden layer

The pass on the joint graph decides alone which heads it fuses. These functions are for logits that
leave Dynamo's graph, which are deferred before that pass, and for reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from fxpass.graph.calls import overloads
from fxpass.graph.functions import LOSSES, function_of, reads_values
from fxpass.graph.nodes import hint, is_tensor, nested_graph, value
from fxpass.graph.region import Region
from fxpass.plan import worth
from fxpass.plan.budget import MIB

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")
# A tile of the vocabulary, or of an adapter, has at least this part of the least logits; the next
# product reads at least this part of a hidden layer's results (a gate halves them, an attention
# reads a third).
PARTS = 8
_SOFTMAXES = {"softmax", "log_softmax", "logsumexp", "_softmax", "_log_softmax", *LOSSES}


def is_product(node: Node) -> bool:
    """True if a node multiplies matrices."""
    return function_of(node) in PRODUCTS and is_tensor(node) and value(node).dim() >= 2


def element_count(node: Node) -> int:
    """The number of a tensor's values, as traced."""
    return hint(value(node).numel())


def bytes_of(node: Node) -> int:
    """Bytes of a node's tensor, as traced."""
    return element_count(node) * value(node).dtype.itemsize


def class_count(node: Node) -> int:
    """The number of outputs of a product: classes, if the product is a head."""
    return hint(value(node).shape[-1])


def hidden_size(node: Node) -> int:
    """The number of hidden values of each row."""
    operands = [n for n in node.all_input_nodes if is_tensor(n) and value(n).dim() > 1]
    return min((hint(value(n).shape[-1]) for n in operands), default=0)


def may_be_large(node: Node, least: float) -> bool:
    """True if a node makes logits, or a part of them, that may be worth a loop of ``least`` MiB."""
    if not is_product(node):
        return False
    if not least:
        return True
    if bytes_of(node) * PARTS < least * MIB:
        return False
    classes = max(class_count(node), hint(value(node).shape[0]))  # they may come first
    return classes * PARTS >= max(worth.LEAST_CLASSES, hidden_size(node))


def why_not_worth(products: Sequence[Node], least: float) -> str | None:
    """The reason why the logits of a head's products are not worth a loop of ``least`` MiB; None
    if they are."""
    hidden = hidden_size(products[0]) if len(products) == 1 else 0
    return worth.too_small(sum(map(bytes_of, products)), class_count(products[0]), hidden, least)


def has_head_shape(node: Node) -> bool:
    """True if a product has as many outputs as a head, and more than inputs."""
    return class_count(node) > hidden_size(node) and class_count(node) >= worth.LEAST_CLASSES


class ProductOperands(NamedTuple):
    """The operands of a product; all None for an einsum that is no linear.

    Attributes:
        x: the factor that has the product's rows.
        weight, bias: the other operands.
    """

    x: Node | None = None
    weight: Node | None = None
    bias: Node | None = None

    @property
    def shared(self) -> bool:
        """True if all rows have the same weight and bias."""
        sizes = [*value(self.weight).shape[:-2]] if self.weight is not None else []
        sizes += value(self.bias).shape[:-1] if self.bias is not None else []
        return self.x is not None and all(hint(n) == 1 for n in sizes)


def product_operands(product: Node) -> ProductOperands:
    """The operands of a product by their roles."""
    function = function_of(product)
    operands = [n for n in _in_order(product) if is_tensor(n)]
    if function == "einsum":
        return _einsum_operands(product)
    if function in ("addmm", "baddbmm"):
        return ProductOperands(operands[1], operands[2], operands[0])
    if product.target == "__rmatmul__":
        operands.reverse()
    return ProductOperands(*operands[:3])


def _in_order(node: Node) -> list[Any]:
    """The arguments of a call in the order of its parameters."""
    for form in overloads(node.op, node.target) if node.kwargs else ():
        given = form.bind(node.args, node.kwargs)
        if given is not None:
            return [given[name] for name in form.parameters if name in given]
    return [*node.args, *node.kwargs.values()]


def _einsum_operands(product: Node) -> ProductOperands:
    text, *rest = product.args
    given: list[Any] = list(rest[0]) if rest and isinstance(rest[0], tuple | list) else rest
    inputs, _, result = str(text).replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) == len(given) == 2 and result:
        for i, own in enumerate(letters):
            other = letters[1 - i]
            if own[:-1] == result[:-1] and sorted(other) == sorted(own[-1:] + result[-1:]):
                return ProductOperands(given[i], given[1 - i])
    return ProductOperands()


def is_reduced(node: Node) -> bool:
    """True if the graph computes a smaller tensor from the outputs of a product."""
    readers = filter(is_tensor, _readers(node))
    return any(element_count(n) * 2 < element_count(node) for n in readers)


def has_softmax(node: Node) -> bool:
    """True if the graph computes a softmax, or its logarithm, of the outputs of a product."""
    return not _SOFTMAXES.isdisjoint(map(function_of, _readers(node)))


def is_multiplied(region: Region, product: Node) -> bool:
    """True if another product reads the outputs of a product, as those of a hidden layer, directly
    or after functions whose results are not much smaller."""
    least = element_count(product) // PARTS
    todo = [(region, product)]
    seen = set[Node]()
    while todo:
        around, node = todo.pop()
        for user in node.users:
            if user.op == "output":
                todo += ((around.outer, n) for n in _returned(around, node) if around.outer)
            elif user not in seen and reads_values(user, node):
                seen.add(user)
                if is_product(user) or _has_product(user):
                    return True
                if not is_tensor(user) or element_count(user) >= least:
                    todo.append((around, user))
    return False


def _has_product(call: Node) -> bool:
    """True if a node calls a nested graph with a product."""
    bodies = filter(None, map(nested_graph, call.args))
    return any(is_product(node) for body in bodies for node in body.graph.nodes)


def _returned(region: Region, node: Node) -> Iterator[Node]:
    """The nodes in the outer graph that are the result ``node`` of a nested graph."""
    results = region.module.graph.output_node().args[0]
    if region.call is None or not isinstance(results, tuple | list):
        return
    places = [i for i, result in enumerate(results) if result is node]
    yield from (user for user in region.call.users if user.args[1:2] in [(i,) for i in places])


def _readers(node: Node) -> set[Node]:
    """The nodes that the values of a product reach, up to the next products."""
    found = set[Node]()
    todo = [node]
    while todo:
        read = todo.pop()
        if read is not node and is_product(read):
            continue
        users = [user for user in read.users if user not in found and reads_values(user, read)]
        found.update(users)
        todo += users
    return found
