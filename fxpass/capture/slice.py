"""The nodes of a graph that compute with logits, from the heads on, until no classes are left.

In: a region of a Dynamo graph and the linears that make logits. Out: a :class:`Slice`: the recorded
calls, and which tensors of which nodes hold one row each, or a number over all rows::

    %logits = linear(%h, %w)               "rrc"
    %shifted = getitem(%logits, ...)       "rrc"
    %loss = cross_entropy(%shifted, ...)   one number of all rows; before it, rows "r"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxpass.capture.custom import recorded
from fxpass.capture.record import Recorder
from fxpass.capture.values import PRODUCTS, Step, Stop, numel
from fxpass.graph.autocast import AutocastDtypes
from fxpass.graph.calls import storage, written
from fxpass.graph.functions import function_of, reads_values
from fxpass.graph.hazards import Writers
from fxpass.graph.nodes import NoMatch, is_tensor, nested_graph, value
from fxpass.graph.placements import is_dtensor
from fxpass.graph.region import AUTOGRAD_FUNCTIONS, Region

# Functions that make a tensor of numbers.
FACTORIES = (
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "eye",
    "linspace",
    "tensor",
    "scalar_tensor",
)
FACTORIES_LIKE = ("new_empty", "new_zeros", "new_ones", "new_full")


class Scope(NamedTuple):
    """What is known of a graph before any slice of it.

    Attributes:
        grads: for each node whether gradients are enabled.
        writers: the nodes that write to each memory.
    """

    grads: Mapping[Node, bool]
    writers: Writers


@dataclass
class Slice:
    """What the nodes of a slice compute.

    Attributes:
        recorder: the calls.
        ran: the nodes that ran, with their results: functional tensors, numbers.
        derived: nodes that read rows or numbers of a slice, and did not have to run.
        left: nodes with classes that are outputs of the graph.
        scope: what is known of the whole graph.
    """

    recorder: Recorder
    scope: Scope
    ran: dict[Node, Any] = field(default_factory=dict)
    derived: set[Node] = field(default_factory=set)
    left: tuple[Node, ...] = ()

    @property
    def steps(self) -> list[Step]:
        """The recorded calls."""
        return self.recorder.steps

    def values(self, node: Node) -> Any:
        """The results of a node that ran, with a :class:`Value` for each tensor."""
        return pytree.tree_map_only(Tensor, self.recorder.value, self.ran[node])

    def makes(self, node: Node) -> bool:
        """Whether a node's results are made of logits."""
        return node in self.ran or node in self.derived

    def boundary(self) -> Iterator[Node]:
        """The nodes that ran, and of which other nodes read the results, or that are outputs of the
        graph without being ``left``."""
        for node in self.ran:
            others = (user for user in node.users if user not in self.ran)
            if any(user.op != "output" or node not in self.left for user in others):
                yield node


def slice_of(
    region: Region,
    seeds: Mapping[Node, bool],
    given: Mapping[Node, str],
    scope: Scope,
) -> Slice:
    """Runs the nodes that read logits.

    Args:
        region: a plain region.
        seeds: the nodes that make logits; whether their classes come first.
        given: nodes that are logits, such as a teacher's, with their tags.
        scope: what is known of the whole graph.

    Raises:
        NoMatch: a node mixes rows, or is no row-wise call.
    """
    recorder = Recorder(dict(seeds))
    found = Slice(recorder, scope)
    walk = _Walk(region, found, given)
    for node in region.module.graph.nodes:
        if node in seeds or walk.reads_classes(node) or walk.writes(node):
            walk.run(node)
        elif node.op != "output" and any(map(found.makes, node.all_input_nodes)):
            found.derived.add(node)
    walk.check_constants()
    walk.check_earlier_reads()
    return found


class _Walk:
    def __init__(self, region: Region, found: Slice, given: Mapping[Node, str]) -> None:
        self.region, self.autocast = region, AutocastDtypes(region)
        self.found, self.recorder, self.given = found, found.recorder, given
        self.writers = found.scope.writers
        self.memory: set[int | None] = set()  # of the nodes that ran
        self.operands: dict[Node, Any] = {}
        self.constants: dict[Node, bool] = {}
        self.spread: dict[Node, bool] = {}

    def reads_classes(self, node: Node) -> bool:
        """Whether a node reads a tensor with classes."""
        if node.op != "output" and not self.given.keys().isdisjoint(node.all_input_nodes):
            return reads_any(node, self.given)
        return any(n in self.found.ran and self._has_classes(n) for n in node.all_input_nodes)

    def writes(self, node: Node) -> bool:
        """Whether a node writes to memory of a node that ran: such as rows of which others read
        the classes."""
        memory = {storage(n) for n in written(node)} if self.found.ran else set()
        return not memory.isdisjoint(self.memory)

    def _has_classes(self, node: Node) -> bool:
        leaves = pytree.tree_leaves(self.found.ran[node])
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        several = isinstance(self.found.ran[node], tuple | list)
        try:
            return any(self.recorder.value(t).of_classes or several for t in tensors)
        except Stop as stop:
            raise NoMatch.at(node, f"({stop})") from None

    def run(self, node: Node) -> Any:
        """Runs a node, and before it the derived nodes that it reads."""
        if node in self.found.ran:
            return self.found.ran[node]
        if node.op == "output":
            reads = [n for n in node.all_input_nodes if n in self.found.ran]
            self.found.left = tuple(n for n in reads if self._has_classes(n))
            return None
        self._check(node)
        for source in node.all_input_nodes:
            if is_tensor(source) and source in self.found.derived:
                self.run(source)
        args, kwargs = map_arg((node.args, node.kwargs), self._argument)
        try:
            out = self._out(node, args, kwargs)
        except Stop as stop:
            raise NoMatch.at(node, f"({stop})") from None
        except NoMatch:
            raise
        except Exception as error:
            why = f"fails on example values: {type(error).__name__}"
            raise NoMatch.at(node, why) from error
        self._check_result(node, out)
        self.found.ran[node] = out
        if is_tensor(node):
            self.memory.add(storage(node))
        self.found.derived.discard(node)
        return out

    def _out(self, node: Node, args: Any, kwargs: Any) -> Any:
        grad = self.found.scope.grads[node]
        if node.target in AUTOGRAD_FUNCTIONS:
            return recorded(self.recorder, self.region, node, args[2:], grad)
        return self.recorder.run(node, args, kwargs, grad, self.autocast(node))

    def _check_result(self, node: Node, out: Any) -> None:
        """Raises where a node has another result here than in the graph."""
        example = node.meta.get("example_value")
        if isinstance(out, Tensor) and isinstance(example, Tensor):
            made = self.recorder.value(out)
            fake = made.fake
            if fake.dtype != example.dtype or fake.dim() != example.dim():
                raise NoMatch.at(node, f"runs in {fake.dtype} outside of the graph")
            # what is written later may give the example a gradient; a view made where gradients are
            # off says that it needs one, and passes none on to what reads it there
            known = storage(node) in self.writers or not self.found.scope.grads[node]
            if made.trained != example.requires_grad and not known:
                raise NoMatch.at(node, "has a gradient in another way than its operands")

    def _argument(self, node: Node) -> Any:
        if node in self.found.ran:
            return self.found.ran[node]
        if node in self.found.derived:
            return self.run(node)
        if node not in self.operands and node not in self.given and self._is_constant(node):
            return self.run(node)
        if node not in self.operands and self._is_spread(node):
            self._spread(node)
        if node not in self.operands:
            example = node.meta.get("example_value")
            if isinstance(example, tuple | list):
                self.operands[node] = pytree.tree_map_only(Tensor, self._no_part(node), example)
            elif isinstance(example, Tensor):
                self.operands[node] = self.recorder.operand(node, self.given.get(node))
            else:
                self.operands[node] = example
        return self.operands[node]

    def _is_constant(self, node: Node) -> bool:
        """Whether a node computes a tensor from numbers alone: the record has its calls, too."""
        if node not in self.constants:
            tensors = [n for n in node.all_input_nodes if is_tensor(n)]
            function = function_of(node)
            known = function in FACTORIES or (bool(tensors) and function not in FACTORIES_LIKE)
            calls = is_tensor(node) and node.op in ("call_function", "call_method")
            known = known and calls and not any(nested_graph(a) for a in node.args)
            like = function in FACTORIES_LIKE
            known = (known and all(map(self._is_constant, tensors))) or (calls and like)
            self.constants[node] = known
        return self.constants[node]

    def _is_spread(self, node: Node) -> bool:
        """Whether a node spreads smaller tensors: one-hot labels, a mask of classes."""
        if node not in self.spread:
            tensors = [n for n in node.all_input_nodes if is_tensor(n)]
            calls = is_tensor(node) and node.op in ("call_function", "call_method")
            known = calls and function_of(node) not in PRODUCTS and not written(node)
            known = known and storage(node) not in self.writers
            known = known and bool(tensors) and not node.meta["example_value"].requires_grad
            size = numel(node.meta["example_value"].shape) if known else 0

            def is_small(n: Node) -> bool:
                small = numel(n.meta["example_value"].shape) * 8 <= size
                return small or self._is_constant(n) or self._is_spread(n)

            self.spread[node] = known and all(map(is_small, tensors))
        return self.spread[node]

    def _spread(self, node: Node) -> None:
        """Records how a node spreads tensors, if that can be told; else it is an operand."""
        args, kwargs = map_arg((node.args, node.kwargs), self._argument)
        count = len(self.recorder.steps)
        try:
            out = self._out(node, args, kwargs)
            self.recorder.value(out).node = node
            self.operands[node] = out
        except Exception:
            del self.recorder.steps[count:]

    def _no_part(self, node: Node) -> Any:
        def part(_: Tensor) -> Any:
            raise NoMatch.at(node, "returns several tensors")

        return part

    def _check(self, node: Node) -> None:
        """Raises for what cannot run on example values alone."""
        nested = any(nested_graph(argument) is not None for argument in node.args)
        if nested and node.target not in AUTOGRAD_FUNCTIONS:
            raise NoMatch.at(node, "is a nested graph")
        if node.op not in ("call_function", "call_method"):
            raise NoMatch.at(node, "is no call of a function")
        if any(is_tensor(n) and is_dtensor(value(n)) for n in (node, *node.all_input_nodes)):
            raise NoMatch.at(node, "is sharded")
        tensors = [value(n) for n in (node, *node.all_input_nodes) if is_tensor(n)]
        if any(t.is_floating_point() and t.itemsize < 2 for t in tensors):
            raise NoMatch.at(node, "computes with numbers of 8 bits")
        for operand in written(node):
            if not self.found.scope.grads[node] and operand.meta["example_value"].requires_grad:
                # its gradient stays that of the value before
                raise NoMatch.at(node, f"writes to %{operand.name} where gradients are off")
            if self._is_detached(operand):
                raise NoMatch.at(node, f"writes to %{operand.name}, which is detached")
            if self._is_constant(operand):
                self.run(operand)
            elif operand not in self.found.ran and operand not in self.found.derived:
                raise NoMatch.at(node, f"writes to %{operand.name}, which is an operand")
            if operand in self.found.ran and self._is_shared(operand):
                raise NoMatch.at(node, f"writes to the memory of %{operand.name}, which is shared")

    def _is_detached(self, node: Node) -> bool:
        """Whether a node needs no gradient, and others of its memory do: what is written to it has
        no gradient, and theirs stays that of the value before."""
        if node.meta["example_value"].requires_grad:
            return False
        known = [n for n in (*self.found.ran, *self.found.derived) if is_tensor(n)]
        aliases = (n for n in known if storage(n) == storage(node))
        return any(n.meta["example_value"].requires_grad for n in aliases)

    def check_constants(self) -> None:
        """Raises where a constant of the record is written outside of it, or read there after it
        was written with logits."""
        for constant in [n for n, known in self.constants.items() if known and n in self.found.ran]:
            writers = self.writers.get(storage(constant), [])
            if any(writer not in self.found.ran for writer in writers):
                raise NoMatch.at(constant, "is written between the linear and the loss")
            if writers and not set(constant.users) <= self.found.ran.keys():
                raise NoMatch.at(constant, "is written with logits, and read by other nodes")

    def check_earlier_reads(self) -> None:
        """Raises where another node reads a result before a node of the slice writes to it: it
        would get what is written, which is all that the region has in the end."""
        last: dict[int | None, Node] = {}
        for memory, writers in self.writers.items():
            inside = [writer for writer in writers if writer in self.found.ran]
            if inside:
                last[memory] = max(inside)
        for node in filter(is_tensor, self.found.ran):
            writer = last.get(storage(node))
            if writer is None:
                continue
            for user in node.users:
                if user not in self.found.ran and user < writer:
                    raise NoMatch.at(writer, f"changes what %{user.name} has read before")

    def _is_shared(self, node: Node) -> bool:
        """Whether memory that is written belongs to an operand, too."""
        memory = storage(node)
        return any(is_tensor(n) and storage(n) == memory for n in self.operands)


def reads_any(node: Node, sources: Mapping[Node, str]) -> bool:
    """Whether a node reads the values of one of some nodes."""
    return any(n in sources and reads_values(node, n) for n in node.all_input_nodes)
