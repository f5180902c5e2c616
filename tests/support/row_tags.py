"""Holds the tags of captured rows against values.

In: a function and its tensors. Out: a :class:`Check`: what :mod:`fxpass.capture` captures of each
head of the function's graph, and what is wrong in it. The recorded ATen calls run on the function's
own tensors, and each tagged tensor keeps three promises:

- *recorded*: what the calls compute is what the graph's nodes give, writes in place included;
- *apart*: if one row of one head's logits changes, only the rows that the tensor's views take of it
  change;
- *by chunks*: computed in the canonical layout from some of the rows, it is what the program has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fxpass.capture.capture import Captured, capture
from fxpass.capture.custom import Custom
from fxpass.capture.function import function_of as rows_function
from fxpass.capture.function import leaves_of
from fxpass.capture.replay import canonical, in_place_of, rows_first, viewed
from fxpass.capture.slice import Scope
from fxpass.capture.values import PRODUCTS, Leaf, Step, Stop, Value
from fxpass.casts.casts import cast_region
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import writers_in
from fxpass.graph.modes import modes_of
from fxpass.graph.nodes import NoMatch, is_tensor
from fxpass.graph.region import Region, regions, return_once
from fxpass.rewrite.inference import without_inference_mode
from fxpass.rewrite.inline import inline_contexts

A = torch.ops.aten
# Relative to the largest value: a chunk sums in another order than the whole.
BOUND = {
    torch.float64: 1e-9,
    torch.float32: 2e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.6e-1,
}


@dataclass
class Check:
    """What was found of a function.

    Attributes:
        captured: the row regions of its graphs.
        refused: for a head without one, why.
        tensors: the number of tagged tensors that were checked.
        wrong: one line for each broken promise.
    """

    captured: list[Captured] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tensors: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def tags(self) -> list[str]:
        """``op tag`` for each tagged result, in order."""
        return [
            f"{step.op.overloadpacket.__name__} {result.tag}"
            for captured in self.captured
            for step in captured.slice.steps
            for result in step.results
            if result.tag is not None
        ]


def check(
    function: Callable[..., Any], *tensors: Any, values: bool = True, **options: Any
) -> Check:
    """Compiles a function, captures its heads, and holds their tags against its values.

    Args:
        values: whether to run the recorded calls.
        options: for ``torch.compile``.
    """
    found = Check()
    torch._dynamo.reset()
    try:
        torch.compile(function, backend=observer(found, values), **options)(*tensors)
    finally:
        torch._dynamo.reset()
    return found


def observer(found: Check, values: bool = True) -> Callable[..., Callable[..., Any]]:
    """A backend of ``torch.compile`` that runs graphs as they are and adds to a check."""

    def backend(module: GraphModule, _: Any) -> Callable[..., Any]:
        region = next(regions(module))
        return_once(region)
        inline_contexts(region)
        without_inference_mode(region)
        cast_region(region, "cast")
        captured = list(_captured(region, found))
        module.recompile()

        def run(*inputs: Any) -> Any:
            kept = _Kept(module)
            out = kept.run(*inputs)
            if values:
                with _plainly():
                    for one in captured:
                        read = kept.read_by(one)
                        found.wrong += _recorded(one, kept, read)
                        _check(one, read, found)
            return out

        return run

    return backend


@contextmanager
def _plainly() -> Iterator[None]:
    """Without gradients, autocast, the program's modes, and effects on its random numbers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield


def _captured(region: Region, found: Check) -> Iterator[Captured]:
    nodes = [n for n in region.module.graph.nodes if function_of(n) in PRODUCTS and is_tensor(n)]
    candidates = [n for n in nodes if n.meta["example_value"].dim() > 1]
    grads = {n: mode.grad for n, mode in modes_of(region).items()}
    done: set[Node] = set()
    for node in candidates:
        if node in done:
            continue
        try:
            one = capture(region, node, candidates, Scope(grads, writers_in(region.module.graph)))
        except NoMatch as no:
            found.refused.append(str(no.reason))
            continue
        done.update(one.heads)
        found.captured.append(one)
        yield one


class _Kept(Interpreter):
    """Runs a graph, and keeps what each node gives: when it is made, when it is read, and after
    later writes."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.kept: dict[Node, Any] = {}
        self.read: dict[tuple[Node, Node], Any] = {}
        self.last: dict[Node, Any] = {}

    def read_by(self, captured: Captured) -> dict[Node, Any]:
        """What nodes give; operands as the first node of a region reads them."""
        found = dict(self.kept)
        for (operand, reader), value in reversed(self.read.items()):
            if reader in captured.slice.ran and operand not in captured.slice.ran:
                found[operand] = value
        return found

    def run_node(self, n: Node) -> Any:
        for operand in filter(is_tensor, n.all_input_nodes):
            self.read[operand, n] = self.env[operand].detach().clone()
        out = super().run_node(n)
        self.last[n] = out
        self.kept[n] = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), out)
        return out


# ---------------------------------------------------------------- replaying a record


class Replay:
    """The tensors of a record, computed from a graph's values.

    Args:
        captured: a row region.
        kept: what each node of the graph gives.
        changed: a head, or logits that are an operand, and the row of it that is another.
    """

    def __init__(
        self, captured: Captured, kept: Mapping[Node, Any], changed: tuple[Value, int] | None = None
    ) -> None:
        self._kept, self._changed = kept, changed
        self.values: dict[int, Any] = {}
        self.sizes: dict[str, int] = {}
        for node, value in kept.items():
            example = node.meta.get("example_value")
            if isinstance(example, torch.SymInt):
                self.sizes.setdefault(str(example.node.expr), value)
            elif isinstance(example, Tensor) and isinstance(value, Tensor):
                self._know_sizes(example.shape, value)
        self.of_backward = _of_backward(captured.slice.steps)
        for step in captured.slice.steps:
            self._run(step)

    def tensor(self, value: Value) -> Tensor:
        """The values of a tensor of the record."""
        if id(value) not in self.values:
            found = value.data if value.node is None else self._kept[value.node]
            assert found is not None
            self._know(value, self._other(value, found))
        return self.values[id(value)]

    def size(self, size: Any) -> Any:
        """A size as a number."""
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr
        if str(expr) not in self.sizes:
            symbols = {s: self.sizes[str(s)] for s in expr.free_symbols}
            return int(expr.subs(symbols))
        return self.sizes[str(expr)]

    def arguments(self, arguments: Any) -> Any:
        """Arguments of a recorded call."""

        def of(argument: Any) -> Any:
            return self.tensor(argument) if isinstance(argument, Value) else self.size(argument)

        return pytree.tree_map(of, arguments, is_leaf=lambda a: isinstance(a, Value))

    def _run(self, step: Step) -> None:
        if isinstance(step.run, Custom):
            for result, output in zip(step.results, step.run.outputs, strict=True):
                self._know(result, self._other(result, self.tensor(output)))
            return
        if any(id(result) in self.of_backward for result in step.results):
            return
        tagged = any(result.tag is not None for result in step.results)
        try:
            args, kwargs = self.arguments((step.args, step.kwargs))
            torch.manual_seed(0)
            made = step.op(*args, **kwargs)
            if step.op.overloadpacket in _EMPTY:  # what is in it is nobody's promise
                made.zero_()
        except Exception:
            if tagged:
                raise
            return  # outside of the region, and of no use for it
        tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
        for result, tensor in zip(step.results, tensors, strict=True):
            self._know(result, self._other(result, tensor))

    def _other(self, value: Value, tensor: Tensor) -> Tensor:
        """The tensor, or one with another row, if it is that which changes."""
        if self._changed is None or value is not self._changed[0]:
            return tensor
        assert value.tag is not None
        tensor = tensor.clone()
        inside = canonical(tensor, value.tag)
        row = inside[self._changed[1]]
        noise = torch.linspace(-3, 3, row.numel(), dtype=torch.float64, device=tensor.device)
        inside[self._changed[1]] = row.flip(-1) * -1.5 + noise.view(row.shape).to(row.dtype)
        return in_place_of(inside, value.tag, tensor.shape).contiguous()

    def _know(self, value: Value, tensor: Tensor) -> None:
        self.values[id(value)] = tensor
        self._know_sizes(value.shape, tensor)

    def _know_sizes(self, shape: Sequence[Any], tensor: Tensor) -> None:
        for size, now in zip(shape, tensor.shape, strict=True):
            if isinstance(size, torch.SymInt):
                self.sizes.setdefault(str(size.node.expr), now)

    def leaf(self, leaf: Leaf, logits: Mapping[int, Value]) -> Tensor:
        """An input of a row function, all its rows."""
        if leaf.head is not None:
            made = logits[id(leaf.head)]
            whole = canonical(self.tensor(made), made.tag or "")
            return viewed(whole.reshape(len(whole), -1), leaf.chain, 1, self.arguments)
        assert leaf.value is not None
        tensor = self.tensor(leaf.value)
        if leaf.kind == "shared":
            return tensor
        return rows_first(tensor, leaf.letters, leaf.chain, self.arguments)


def _of_backward(steps: Sequence[Step]) -> set[int]:
    """The tensors that the backward of custom functions makes of incoming gradients."""
    customs = [step.run for step in steps if isinstance(step.run, Custom)]
    found = {id(value) for custom in customs for value in custom.incoming}
    for step in steps:
        if any(id(value) in found for value in step.values):
            found |= {id(result) for result in step.results}
    return found


_EMPTY = (A.empty, A.empty_like, A.new_empty, A.empty_strided, A.new_empty_strided)


# ---------------------------------------------------------------- the promises


def _recorded(captured: Captured, kept: _Kept, read: Mapping[Node, Any]) -> Iterator[str]:
    """Results that are others than the graph's."""
    results = {node: captured.slice.values(node) for node in captured.slice.boundary()}
    replay = Replay(captured, read)
    for node, made_here in results.items():
        made, last = map(pytree.tree_leaves, (kept.kept[node], kept.last[node]))
        for one, *tensors in zip(pytree.tree_leaves(made_here), made, last, strict=True):
            if not isinstance(one, Value) or id(one) not in replay.values:
                continue
            # a later write is in the record if the write's node is
            bound, found = BOUND[_coarsest(one)], replay.tensor(one)
            if not any(_alike(found, tensor.detach(), bound) for tensor in tensors):
                yield f"%{node.name} is recorded as another tensor"


def _check(captured: Captured, kept: Mapping[Node, Any], found: Check) -> None:
    steps = captured.slice.steps
    logits = {id(step.head): step.results[0] for step in steps if step.head is not None}
    known = Replay(captured, kept)
    tagged = [r for step in steps if step.run for r in step.results if r.tag is not None]
    tagged = [r for r in tagged if id(r) not in known.of_backward]
    leaves: dict[int, list[Leaf]] = {}
    for value in tagged:
        try:
            leaves[id(value)] = leaves_of([value], value.fake.device)
        except Stop:
            continue  # a result that no output needs, and cannot be made: capture refuses it
        found.tensors += 1
        found.wrong += _by_chunks(value, leaves[id(value)], known, logits)
    sources = [*logits.values(), *_given(leaves.values())]
    for source in sources:
        rows = len(canonical(known.tensor(source), source.tag or ""))
        for row in sorted({0, rows // 3, rows - 1}):
            other = Replay(captured, kept, (source, row))
            for value in tagged:
                if id(value) in leaves:
                    of = [_leaf_source(leaf, logits) is source for leaf in leaves[id(value)]]
                    mine = [x for x, is_of in zip(leaves[id(value)], of, strict=True) if is_of]
                    found.wrong += _apart(value, mine, row, rows, known, other)


def _given(leaves: Any) -> list[Value]:
    """Operands that are logits."""
    values = [leaf.value for some in leaves for leaf in some if leaf.value is not None]
    return list({id(v): v for v in values if v.tag is not None}.values())


def _leaf_source(leaf: Leaf, logits: Mapping[int, Value]) -> Value | None:
    return leaf.value if leaf.head is None else logits[id(leaf.head)]


def _named(value: Value) -> str:
    assert value.step is not None
    return f"%{value.step.node.name}: aten.{value.step.op.overloadpacket.__name__} {value.tag}"


def _apart(
    value: Value, leaves: Sequence[Leaf], row: int, rows: int, known: Replay, other: Replay
) -> Iterator[str]:
    """Rows that change with a row that they are not made of."""
    a, b = (canonical(replay.tensor(value), value.tag or "") for replay in (known, other))
    if a.shape != b.shape:
        yield f"{_named(value)} has another shape"
        return
    changed = (a != b) & ~((a != a) & (b != b))
    if a.is_floating_point():  # vectors and single numbers are rounded in other ways
        changed &= ~((a - b).abs() <= 8 * torch.finfo(a.dtype).eps * a.abs())
    changed = changed[:, None].flatten(1).any(1)
    allowed = torch.zeros(len(a), dtype=torch.bool, device=a.device)
    for leaf in leaves:
        assert leaf.head is not None or leaf.value is not None
        numbers = torch.arange(rows, device=a.device)
        if leaf.head is None and leaf.value is not None:
            numbers = numbers.view(known.arguments(leaf.value.rows))
        allowed |= viewed(numbers, leaf.chain, numbers.dim(), known.arguments).expand(len(a)) == row
    more = (changed & ~allowed).nonzero().flatten().tolist()
    if more:
        yield f"{_named(value)} changes in rows {more[:4]} with row {row}"


def _by_chunks(
    value: Value, leaves: list[Leaf], known: Replay, logits: Mapping[int, Value]
) -> Iterator[str]:
    """Rows that are others when they are computed from a few rows alone."""
    if not leaves or leaves[0].kind == "shared":
        return
    whole = canonical(known.tensor(value), value.tag or "")
    n = len(whole)
    chosen = torch.arange(n, device=whole.device).flip(0)[: max(2, n // 3)][::2]
    if not len(chosen):
        return
    tensors = []
    for leaf in leaves:
        tensor = known.leaf(leaf, logits)
        if leaf.kind != "shared" and len(tensor) != n:
            yield f"{_named(value)} has {n} rows, its {leaf.kind} {len(tensor)}"
            return
        tensors.append(tensor if leaf.kind == "shared" else tensor[chosen])
    try:
        (made,) = rows_function(leaves, [value])(*tensors)
    except (KeyError, Stop):
        return  # a symbolic size of the program that no input of these rows has
    except Exception as error:
        yield f"{_named(value)} fails on a chunk: {type(error).__name__}: {error}"
        return
    if not _alike(made, whole[chosen], BOUND[_coarsest(value)]):
        yield f"{_named(value)} is another on a chunk of rows"


def _coarsest(value: Value) -> torch.dtype:
    """The dtype with the fewest bits on the way to a tensor: one rounding may be another."""
    found, todo, seen = torch.float64, [value], {id(value)}
    while todo:
        one = todo.pop()
        if one.fake.dtype in BOUND:
            found = max(found, one.fake.dtype, key=lambda dtype: BOUND[dtype])
        for source in one.step.values if one.step is not None else ():
            if id(source) not in seen:
                seen.add(id(source))
                todo.append(source)
    return found


def _alike(made: Tensor, wanted: Tensor, bound: float) -> bool:
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return bool((made != wanted).float().mean() <= 0.02) if made.numel() else True
    odd = ~wanted.isfinite()
    if not torch.equal(odd, ~made.isfinite()):
        return False
    made, wanted = made.masked_fill(odd, 0).double(), wanted.masked_fill(odd, 0).double()
    most = wanted.abs().max().clamp_min(1) if wanted.numel() else 1
    return bool(((made - wanted).abs() <= bound * most).all())


@contextmanager
def rule_for(packet: Any, rule: Any) -> Iterator[None]:
    """Another rule for a call: for tests of this check."""
    from fxpass.capture.rows import RULES

    old = RULES.get(packet)
    RULES[packet] = rule
    try:
        yield
    finally:
        if old is None:
            del RULES[packet]
        else:
            RULES[packet] = old
