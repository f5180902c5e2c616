"""Records the ATen calls of Dynamo nodes, functionalised, with a tag on every tensor.

In: Dynamo nodes, in the order of the graph, of which the products of some make logits. Out: the
tensors of each node, as :class:`fxpass.capture.values.Value`. The calls run on example values:
autocast, composite functions, methods and writes in place are the dispatcher's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxpass.capture.indexing  # noqa: F401, adds its rules
from fxpass.capture.dimensions import reduces_rows
from fxpass.capture.products import head_of, shared_matrix
from fxpass.capture.rewritten import REPLACED, decomposition_of, in_two
from fxpass.capture.rows import ELEMENTWISE_LOSSES, A, bound, call, is_like, number_of, rule_of
from fxpass.capture.values import Head, Size, Step, Stop, Value, same, values_in
from fxpass.graph.nodes import hint

_TORCH: Any = torch  # whose functions of functional tensors are not exported
_OF_ONE_DTYPE = {A.nll_loss_forward, A.nll_loss2d_forward}
_IGNORED = {torch.ops.prim.device.default, A._assert_tensor_metadata.default}


class Recorder(TorchDispatchMode):
    """Runs Dynamo nodes and tags their tensors.

    Attributes:
        steps: the calls, in order.
        heads: the heads that were made.
        classes: the classes of the smallest head so far.
        numbers: the floats that calls of elements read, in order.
        varied: the values of those of them that are operands.
        dtypes: of the results of each call, in order.

    Args:
        seeds: the nodes that make logits; whether their classes come first.
        varying: the positions of ``numbers`` that are operands.
    """

    def __init__(self, seeds: dict[Node, bool], varying: Collection[int] = ()):
        super().__init__()
        self.seeds, self.varying = seeds, varying
        self.numbers: list[float] = []
        self.varied: list[Value] = []
        self.dtypes: list[tuple[torch.dtype, ...]] = []
        self._counted = False
        self.steps: list[Step] = []
        self.heads: list[Head] = []
        self.classes = 1 << 62
        self._values: dict[int, Value] = {}
        self._node: Any = None
        self._grad = False
        self._head: Head | None = None

    # ------------------------------------------------------------ Dynamo nodes

    def operand(self, node: Node, example: Tensor, tag: str | None = None) -> Tensor:
        """The functional tensor of a node that is an operand; with a tag if it is logits."""
        if example.dtype == torch.bool:
            # a mask knows how many rows it takes, wherever it is used
            self._values[id(example)] = Value(example, node=node)
            return _TORCH._to_functional_tensor(example)
        return self.tensor(example, tag, example.requires_grad, node=node)

    def tensor(self, like: Tensor, tag: str | None, trained: bool, **origin: Any) -> Tensor:
        """A functional tensor that no call makes, without the history and storage of the one that
        it is like: a write is seen, and changes nothing else."""
        with torch.no_grad(), self.fake_mode(like):
            fake = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        self._values[id(fake)] = Value(fake, tag, trained=trained, **origin)
        return _TORCH._to_functional_tensor(fake)

    def given(self, value: Value) -> Tensor:
        """A functional tensor of what another record has."""
        self._values[id(value.fake)] = value
        return _TORCH._to_functional_tensor(value.fake)

    def run(self, node: Node, args: Any, kwargs: Any, grad: bool, dtype: torch.dtype | None) -> Any:
        """Runs one node on functional tensors; returns its results, functional too.

        Args:
            node: the node.
            args, kwargs: its arguments.
            grad: whether gradients are enabled.
            dtype: of autocast, or None.

        Raises:
            Stop: a call has no rule.
        """
        self._node, self._head = node, None
        target: Any = node.target
        function = getattr(Tensor, target) if node.op == "call_method" else target
        return self.call(function, args, kwargs, grad, dtype, node.meta.get("example_value"))

    def call(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        grad: bool,
        dtype: torch.dtype | None,
        example: Any,
    ) -> Any:
        """Calls a torch function on functional tensors, as :meth:`run` a node; ``example`` is a
        value of it, for a function that takes no tensor."""
        self._grad = grad
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        function = REPLACED.get(function, function)
        device = (tensors[0] if tensors else example).device.type
        mode = torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
        fake = self.fake_mode(_TORCH._from_functional_tensor(tensors[0]) if tensors else example)
        with (
            torch.set_grad_enabled(grad),
            mode,
            fake,
            self,
            _functionalised(),
            _unbound(fake),
            _symbolic(),
        ):
            return function(*args, **kwargs)

    def value(self, tensor: Tensor) -> Value:
        """What is recorded of a functional tensor: its views are taken again where it was written.

        Raises:
            Stop: such a view has no rule.
        """
        fake = self.fake_mode(_TORCH._from_functional_tensor(tensor))
        with fake, self, _functionalised(), _unbound(fake):
            _TORCH._sync(tensor)
        return self._values[id(_TORCH._from_functional_tensor(tensor))]

    @staticmethod
    def fake_mode(example: Any) -> AbstractContextManager[Any]:
        """The fake mode of an example value."""
        return getattr(example, "fake_mode", None) or nullcontext()

    # ------------------------------------------------------------ ATen calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORED:
            return func(*args, **kwargs)
        given, named = pytree.tree_map_only(Tensor, self._known, (args, kwargs))
        tagged = [v for v in values_in((given, named)) if v.tag is not None or v.late]
        of_classes = any(v.of_classes for v in tagged)
        if of_classes and func.overloadpacket in _OF_ONE_DTYPE:
            floats = [v.fake.dtype for v in (*given[:1], *given[2:3]) if isinstance(v, Value)]
            if len(set(floats)) > 1:
                raise Stop(f"has class weights of {floats[-1]}, for which PyTorch raises an error")
        if of_classes and func.overloadpacket in ELEMENTWISE_LOSSES:
            named_args = bound(Step(func, args, kwargs, self._grad, self._node))
            if reduction := named_args["reduction"]:
                with self:
                    losses = call(func, named_args | {"reduction": 0})
                    return (A.mean if reduction == 1 else A.sum)(losses)
        if of_classes and (decomposition := decomposition_of(func)) is not None:
            with self:
                return decomposition(*args, **kwargs)
        shared = shared_matrix(func, given) if self._node in self.seeds and not tagged else None
        if shared is not None:  # the product of a batch with one matrix is one of its rows
            x = args[0]
            with self:
                rows = A.mm(x.reshape(x.shape[0] * x.shape[1], x.shape[2]), shared.fake)
                return A.view(rows, (*x.shape[:2], rows.shape[1]))
        if of_classes and (dim := _selects(func, given)) is not None:
            index = args[1][dim]
            with self:
                index = torch.where(index < 0, index + args[0].shape[dim], index)
                return A.index_select(args[0], dim, index)
        if (changed := self._with_operands(func, args)) is not None:
            with self:
                return func.overloadpacket(*changed, **kwargs)
        step = Step(func, given, named, torch.is_grad_enabled(), self._node)
        if self._grad and not step.grad and any(v.trained for v in tagged):
            raise Stop(f"aten.{func.overloadpacket.__name__} runs with gradients switched off")
        whole = of_classes and not any(v.late for v in tagged)
        if (inside := reduces_rows(step) if whole else None) is not None:
            with self:
                return in_two(step, inside, args)
        out = func(*args, **kwargs)
        if tagged and is_like(step) and _is_apart(given[0].shape, out.shape):
            with self:  # it reads the argument's dtype and device alone
                return torch.full(out.shape, number_of(step), dtype=out.dtype, device=out.device)
        self._tag(step, out, tagged)
        return out

    def _with_operands(self, func: Any, args: Sequence[Any]) -> Sequence[Any] | None:
        """Arguments with operands in the place of numbers that vary; None if none does."""
        counted, self._counted = self._counted, False
        if counted or torch.Tag.pointwise not in func.tags:
            return None
        changed = list(args)
        for i, number in enumerate(args):
            if type(number) is not float:
                continue
            tensor = next(a for a in args if isinstance(a, Tensor))
            alone = not any(a.dim() for a in args if isinstance(a, Tensor))
            if len(self.numbers) in self.varying and not (alone and tensor.itemsize < 4):
                # a tensor without dimensions promotes others, but for those with some
                dtype = tensor.dtype if alone else torch.float64
                changed[i] = tensor.new_empty((), dtype=dtype)
                value = self._values[id(changed[i])] = Value(changed[i])
                self.varied.append(value)
                self._counted = True
            self.numbers.append(number)
        return changed if self._counted else None

    def _known(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._values:  # a constant of the call
            self._values[id(tensor)] = Value(tensor, data=tensor)
        return self._values[id(tensor)]

    def _tag(self, step: Step, out: Any, tagged: list[Value]) -> None:
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        late = any(v.late for v in tagged)
        floats = [t.is_floating_point() for t in tensors]
        self.dtypes.append(tuple(t.dtype for t in tensors))
        needs = step.grad and any(v.trained for v in step.values)
        needs = needs and step.op.overloadpacket is not A.detach and not is_like(step)
        if (
            step.op.overloadpacket in (A.lift_fresh, A.lift_fresh_copy)
            and step.values[0].node is None
        ):
            self._values[id(out)] = Value(out, data=step.values[0].data)
            return
        step.results = tuple(
            Value(t, step=step, index=i, late=late, trained=needs and floats[i])
            for i, t in enumerate(tensors)
        )
        for value in step.results:
            self._values[id(value.fake)] = value
        self.steps.append(step)
        if not tagged:
            self._make_head(step)
            return
        try:
            if late and any(v.of_classes for v in tagged):
                raise Stop("reads a number that mixes rows of the logits")
            if late:
                return
            self._apply_rule(step)
        except Stop as stop:
            if any(v.of_classes for v in tagged):
                name = step.op.overloadpacket.__name__
                raise Stop(f"aten.{name} {stop}") from None
            for value in step.results:  # rows that are mixed outside of the region
                value.tag, value.late = None, True

    def _apply_rule(self, step: Step) -> None:
        if torch.Tag.nondeterministic_seeded in step.op.tags:
            raise Stop("draws random numbers, other ones for a chunk of rows")
        numbers = pytree.tree_leaves((step.args, step.kwargs))
        if any(isinstance(number, torch.SymFloat) for number in numbers):
            raise Stop("has a number that varies, which is no operand")
        rule = rule_of(step.op)
        if rule is None:
            raise Stop("has no row rule")
        found = rule(step, self.classes)
        for value, tag in zip(step.results, found.tags, strict=True):
            value.tag = tag
        step.run = found.run

    def _make_head(self, step: Step) -> None:
        if self._node not in self.seeds or self._head is not None:
            return
        found = head_of(step, self.seeds[self._node])
        if found is None:
            return
        head, tag = found
        self._head = step.head = head
        self.heads.append(head)
        self.classes = min(self.classes, hint(head.classes))
        step.results[0].tag = tag


def _is_apart(old: Sequence[Size], new: Sequence[Size]) -> bool:
    return len(old) != len(new) or not all(map(same, old, new))


def _selects(func: Any, given: Sequence[Any]) -> int | None:
    """The dimension of rows, behind others, that a call indexes with one list of numbers."""
    if func is not A.index.Tensor or not isinstance(given[0], Value) or given[0].tag is None:
        return None
    at = [i for i, index in enumerate(given[1]) if index is not None]
    alone = len(at) == 1 and at[0] > 0 and given[0].tag[at[0]] == "r"
    index = given[1][at[0]].fake if alone else None
    return at[0] if index is not None and index.dim() == 1 and index.dtype == torch.int64 else None


@contextmanager
def _functionalised() -> Iterator[None]:
    _TORCH._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        _TORCH._disable_functionalization()


@contextmanager
def _unbound(mode: Any) -> Iterator[None]:
    """Sizes of masks are new symbols here, which no node of the graph has to define. A decision on
    a size, which the calls of the graph make again when they are traced, is no guard."""
    env = getattr(mode, "shape_env", None)
    if env is None:
        yield
        return
    with env.ignore_fresh_unbacked_symbols(), env.suppress_guards():
        yield


def _symbolic() -> AbstractContextManager[Any]:
    """Up to torch 2.12, C++ composites take no symbolic sizes, and those in Python do."""
    return enable_python_dispatcher() if torch.__version__ < "2.13" else nullcontext()
