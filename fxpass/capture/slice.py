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
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpass.capture.custom import recorded
from fxpass.capture.inputs import Inputs
from fxpass.capture.record import Recorder
from fxpass.capture.sharding import (
    Sharding,
    check_local,
    check_placing,
    check_tensor,
    of_head,
)
from fxpass.capture.values import Step, Stop
from fxpass.graph.autocast import AutocastDtypes
from fxpass.graph.calls import storage, written
from fxpass.graph.functions import reads_values
from fxpass.graph.hazards import Writers
from fxpass.graph.nodes import NoMatch, is_tensor, nested_graph, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.region import AUTOGRAD_FUNCTIONS, Region


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
        stops: nodes that read logits and did not run, and why.
        sharding: how the head is distributed over ranks; None for plain tensors.
        scope: what is known of the whole graph.
    """

    recorder: Recorder
    scope: Scope
    ran: dict[Node, Any] = field(default_factory=dict)
    derived: set[Node] = field(default_factory=set)
    left: tuple[Node, ...] = ()
    stops: dict[Node, NoMatch] = field(default_factory=dict)
    sharding: Sharding | None = None

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
    kept: bool = False,
) -> Slice:
    """Runs the nodes that read logits.

    Args:
        region: a plain region.
        seeds: the nodes that make logits; whether their classes come first.
        given: nodes that are logits, such as a teacher's, with their tags.
        scope: what is known of the whole graph.
        kept: whether the logits exist: a node that is not row-wise reads them as they are.

    Raises:
        NoMatch: a node mixes rows, or is no row-wise call.
    """
    recorder = Recorder(dict(seeds))
    found = Slice(recorder, scope)
    walk = _Walk(region, found, given)
    for node in region.module.graph.nodes:
        if node in seeds or walk.reads_classes(node) or walk.writes(node):
            try:
                walk.run(node)
            except NoMatch as no:
                if not kept or node in seeds or written(node):
                    raise
                found.stops[node] = no
        elif node.op != "output" and any(map(found.makes, node.all_input_nodes)):
            found.derived.add(node)
    walk.check_constants()
    walk.check_earlier_reads()
    return found


class _Walk(Inputs):
    def __init__(self, region: Region, found: Slice, given: Mapping[Node, str]) -> None:
        super().__init__(found, given)
        self.region, self.autocast = region, AutocastDtypes(region)
        self.memory: set[int | None] = set()  # of the nodes that ran

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
        if node in self.recorder.seeds:
            self.enter(node)
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.of(n, node))
        count = len(self.recorder.steps)
        try:
            placed = placement_name(node.target) and self.found.sharding is not None
            out = self._placed(node) if placed else self.out(node, args, kwargs)
        except Stop as stop:
            raise NoMatch.at(node, f"({stop})") from None
        except NoMatch:
            raise
        except Exception as error:
            why = f"fails on example values: {type(error).__name__}"
            raise NoMatch.at(node, why) from error
        self._check_result(node, out)
        if not (placed or self.local.isdisjoint(node.all_input_nodes)):
            check_local(node, self.recorder.steps[count:])
            self.local.add(node)
        if node in self.recorder.seeds:
            self._shard(node)
        if is_tensor(node) and self.found.sharding is not None and self._is_of_classes(out):
            check_tensor(node)
        self.found.ran[node] = out
        if is_tensor(node):
            self.memory.add(storage(node))
        self.found.derived.discard(node)
        return out

    def out(self, node: Node, args: Any, kwargs: Any) -> Any:
        grad = self.found.scope.grads[node]
        if node.target in AUTOGRAD_FUNCTIONS:
            return recorded(self.recorder, self.region, node, args[2:], grad)
        return self.recorder.run(node, args, kwargs, grad, self.autocast(node))

    def _shard(self, node: Node) -> None:
        """Notes how a head is sharded."""
        if not any(is_tensor(n) and is_dtensor(value(n)) for n in node.all_input_nodes):
            return
        if len(self.recorder.seeds) > 1:
            raise NoMatch.at(node, "is one of several heads, whose classes are sharded")
        head = next((h for h in self.recorder.heads if h.node is node), None)
        self.found.sharding = head and of_head(head)

    def _placed(self, node: Node) -> Any:
        """A node that changes placements: the same tensor."""
        (source, *_) = node.all_input_nodes
        assert self.found.sharding is not None
        check_placing(node, source, self.found.sharding)
        return self.argument(source, node)

    def _is_of_classes(self, out: Any) -> bool:
        return isinstance(out, Tensor) and self.recorder.value(out).of_classes

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

    def _check(self, node: Node) -> None:
        """Raises for what cannot run on example values alone."""
        nested = any(nested_graph(argument) is not None for argument in node.args)
        if nested and node.target not in AUTOGRAD_FUNCTIONS:
            raise NoMatch.at(node, "is a nested graph")
        if node.op not in ("call_function", "call_method"):
            raise NoMatch.at(node, "is no call of a function")
        sharded = any(is_tensor(n) and is_dtensor(value(n)) for n in (node, *node.all_input_nodes))
        if sharded and self.found.sharding is None and node not in self.recorder.seeds:
            raise NoMatch.at(node, "is sharded")
        for operand in filter(is_tensor, node.all_input_nodes):
            _check_plain(operand)
        tensors = [value(n) for n in (node, *node.all_input_nodes) if is_tensor(n)]
        if any(t.is_floating_point() and t.itemsize < 2 for t in tensors):
            raise NoMatch.at(node, "computes with numbers of 8 bits")
        for operand in written(node):
            if not self.found.scope.grads[node] and operand.meta["example_value"].requires_grad:
                # its gradient stays that of the value before
                raise NoMatch.at(node, f"writes to %{operand.name} where gradients are off")
            if self._is_detached(operand):
                raise NoMatch.at(node, f"writes to %{operand.name}, which is detached")
            if self.is_constant(operand):
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


def _check_plain(node: Node) -> None:
    """Raises unless a node's value is a plain tensor, or a DTensor."""
    example = value(node)
    if is_functorch_wrapped_tensor(example):
        raise NoMatch(node, f"%{node.name} is inside a torch.func transform (vmap, grad, ...)")
    if is_traceable_wrapper_subclass(example) and not is_dtensor(example):
        raise NoMatch(node, f"%{node.name} is a {type(example).__name__}, not a plain tensor")


def reads_any(node: Node, sources: Mapping[Node, str]) -> bool:
    """Whether a node reads the values of one of some nodes."""
    return any(n in sources and reads_values(node, n) for n in node.all_input_nodes)
