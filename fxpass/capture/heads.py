"""Products that may be heads: their sizes, and what tells a head from a hidden layer.

In: a node of a Dynamo graph. Out: whether its output may be logits that are worth an operator
(``FUSEDCE_MIN_LOGITS_MB``; 0 fuses all), or why not::

    linear(%h [4096, 2048], %w [128256, 2048])    1.05 GB of bf16 logits: a head
    linear(%h [4096, 2048], %w [8192, 2048])      read by the next product: a hidden layer
"""

from __future__ import annotations

from torch.fx import Node

from fxpass.capture.values import PRODUCTS, Head, numel
from fxpass.graph.functions import LOSSES, function_of, reads_values
from fxpass.graph.nodes import NoMatch, hint, is_tensor, nested_graph, value
from fxpass.graph.region import CHECKPOINTS, NESTED_REGIONS, Region
from fxpass.plan import worth
from fxpass.plan.plan import MIB
from fxpass.settings import Settings

# Parts of the least logits that a tile of the vocabulary, or of an adapter, may be.
PARTS = 8


class Costs(NoMatch):
    """Why fusing a head would cost more than it saves."""


def is_product(node: Node) -> bool:
    """Whether a node multiplies matrices."""
    return function_of(node) in PRODUCTS and is_tensor(node) and value(node).dim() >= 2


def bytes_of(node: Node) -> int:
    """Bytes of a node's tensor, as traced."""
    return hint(value(node).numel()) * value(node).dtype.itemsize


def too_small(node: Node, least: float, head: Head | None = None) -> str | None:
    """Why the logits of a product are not worth an operator.

    Args:
        node: the product.
        least: the size of logits, in MiB, that are worth an operator.
        head: what was captured of it; without it, its columns are the classes.
    """
    classes, hidden = columns(node), hidden_of(node)
    if head is not None:
        classes, hidden = hint(head.classes), hint(head.x.shape[-2 if head.first else -1])
    return worth.too_small(bytes_of(node), classes, hidden, least)


def columns(node: Node) -> int:
    """The number of outputs of a product."""
    return hint(value(node).shape[-1])


def hidden_of(node: Node) -> int:
    """The number of hidden values of each row."""
    operands = [n for n in node.all_input_nodes if is_tensor(n) and value(n).dim() > 1]
    return min((hint(value(n).shape[-1]) for n in operands), default=0)


def may_be_large(node: Node, least: float) -> bool:
    """Whether a node makes logits, or a part of them, that may be worth an operator."""
    if not is_product(node):
        return False
    if not least:
        return True
    if bytes_of(node) * PARTS < least * MIB:
        return False
    classes = max(columns(node), hint(value(node).shape[0]))  # they may come first
    return classes * PARTS >= max(worth.LEAST_CLASSES, hidden_of(node))


def widens(node: Node) -> bool:
    """Whether a product has as many outputs as a head, and more than inputs."""
    return columns(node) > hidden_of(node) and columns(node) >= worth.LEAST_CLASSES


def looks_like_a_head(node: Node) -> bool:
    """Whether a product has more outputs than inputs, and the graph reduces them, but makes no
    product of them, as of those of a hidden layer."""
    if not is_product(node) or not widens(node):
        return False
    found, size_of = _readers(node), numel(value(node).shape)
    if any(function_of(n) in PRODUCTS or _is_fused(n) for n in found):
        return False
    return any(is_tensor(n) and numel(value(n).shape) * 2 < size_of for n in found)


def _is_fused(node: Node) -> bool:
    """Whether a node is an operator call that took the place of a product."""
    return getattr(node.target, "namespace", "") == "fxpass" and len(node.all_input_nodes) > 1


def has_loss(node: Node) -> bool:
    """Whether a loss with a name is computed from the output of a product, by no other product."""
    return any(function_of(n) in LOSSES for n in _readers(node))


def takes_softmax(node: Node) -> bool:
    """Whether a softmax, or its logarithm, is taken of the output of a product, and no product of
    that, as of attention scores."""
    functions = set(map(function_of, _readers(node)))
    return not functions.isdisjoint(_SOFTMAXES) and functions.isdisjoint(PRODUCTS)


_SOFTMAXES = ("softmax", "log_softmax", "logsumexp", "_softmax", "_log_softmax")


def _readers(node: Node) -> set[Node]:
    """The nodes that values of a product reach, up to the next products."""
    found, todo = set[Node](), [node]
    while todo:
        read = todo.pop()
        if read is not node and function_of(read) in PRODUCTS:
            continue
        users = [user for user in read.users if user not in found and reads_values(user, read)]
        found.update(users)
        todo += users
    return found


def in_nested(region: Region, settings: Settings) -> list[Node]:
    """The calls of checkpoints and of nested regions in which logits are made: those of nested
    regions, and those that a checkpoint returns."""
    targets = CHECKPOINTS | NESTED_REGIONS
    calls = [n for n in region.module.graph.nodes if n.target in targets]
    return [n for n in calls if region.plain and _has_logits(n, settings)]


def _has_logits(call: Node, settings: Settings) -> bool:
    body = next((b for b in map(nested_graph, call.args) if b is not None), None)
    if body is None:
        return False
    made = [n for n in body.graph.nodes if may_be_large(n, settings.min_logits_mb)]
    if call.target in NESTED_REGIONS and not settings.min_logits_mb:
        return bool(made)
    if call.target in NESTED_REGIONS and any(map(looks_like_a_head, made)):
        return True
    least = min((hint(value(n).numel()) for n in made), default=0) // 2
    returned = body.graph.output_node().all_input_nodes
    return bool(made) and any(is_tensor(n) and hint(value(n).numel()) > least for n in returned)
