"""Measures one program: what fxpass fuses, what is left of the logits, and whether it is right.

In: a :class:`Program`. Out: a :class:`Result`. The program is compiled with ``backend="fusedce"``;
its inner backend, :func:`counting`, runs each rewritten graph once by itself and lists the tensors
of the logits' size in it::

    >>> from benchmarks.programs.catalog import catalog
    >>> [program] = catalog(only="^nll_loss of log_softmax$", libraries=False)
    >>> result = examine(program)
    >>> result.status, result.left, result.wrong
    ('fused', (), '')
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import config
from torch._dynamo.backends import registry
from torch.utils import _pytree as pytree

from benchmarks.compiled import Records, break_reason
from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import Function, Program
from fxpass.capture.rejections import Rejection
from fxpass.rewrite.matches import RegionMatch
from tests.support.numerics import assert_close, in_other_orders

INNER = "benchmarks_programs"
# of a head, not of a copy of the weight
LARGE = SIZES.v * SIZES.d
# of a nested graph, its first argument
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# of a nested graph, its name and its arguments
INVOKE = torch.ops.higher_order.invoke_subgraph
STATUSES = ("fused", "part", "kept", "no", "silent", "break")

Values = dict[str, Tensor | None]


@dataclass(frozen=True)
class Result:
    """What became of a program.

    Attributes:
        matches: calls of the fused operator.
        kept: whether the logits of a head are kept.
        left: the functions that make a tensor of the logits' size outside the operator.
        rejections: the reasons.
        breaks: the reasons of Dynamo's graph breaks.
        wrong: why values, gradients or dtypes are not as accurate as eager's; empty if they are.
    """

    program: Program
    matches: int = 0
    kept: bool = False
    left: tuple[str, ...] = ()
    rejections: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def status(self) -> str:
        """One of ``STATUSES``."""
        if self.matches and not self.left:
            return "fused"
        if self.matches:
            return "kept" if self.kept else "part"
        if self.breaks or not self.left:
            return "break"
        return "no" if self.rejections else "silent"

    @property
    def reason(self) -> str:
        """Why the status is not ``fused``, as far as fxpass or Dynamo says it."""
        if self.status == "fused":
            return ""
        if self.status == "break":
            return "; ".join(dict.fromkeys(self.breaks)) or "no head in the graph"
        return self.rejections[0] if self.rejections else ""


def examine(program: Program) -> Result:
    """Compiles and runs a program, and compares it with eager and float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, and of torch about them
        return _examine(program)


def _examine(program: Program) -> Result:
    torch._dynamo.reset()
    exact, eager = (run(program, program.function, dtype) for dtype in (torch.float64, None))
    records: list[Any] = []
    found = _Graphs()
    options: Any = {"fusedce.min_logits_mb": 0, "fusedce.inner": INNER}
    try:
        with Records(records), _listed_in(found), config.patch(**program.dynamo):
            function = program.function
            if program.spell is not None:
                function = program.spell(function, program.tensors())
            got = run(program, torch.compile(function, backend="fusedce", options=options))
        wrong = differs(program, got, eager, exact)
    except Exception as error:  # eager raised nothing
        wrong = f"raises {type(error).__name__}: " + " ".join(str(error).split())[:200]
    finally:
        torch._dynamo.reset()
    heads = [record for record in records if isinstance(record, RegionMatch)]
    return Result(
        program,
        matches=sum(len(head.calls) for head in heads),
        kept=any(head.logits_mode == "keep" for head in heads),
        left=tuple(found.left),
        rejections=tuple(r.reason for r in records if isinstance(r, Rejection)),
        breaks=tuple(found.breaks),
        wrong=wrong,
    )


# ---------------------------------------------------------------- values


def run(program: Program, function: Function, dtype: torch.dtype | None = None) -> Values:
    """Outputs, then the gradients of all operands that need some (None where there is none).

    Args:
        function: ``program.function``, compiled or not.
        dtype: the dtype to compute in; that of the program by default.
    """
    return _run(program, function, program.tensors(dtype))


def _run(program: Program, function: Function, tensors: Sequence[Tensor]) -> Values:
    with torch.set_grad_enabled(bool(program.gradients)):
        made = function(*tensors)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    values: Values = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    trained = [t for t in outputs if t.requires_grad]
    if program.gradients:
        torch.autograd.backward(trained, [_upstream(t) for t in trained])
    for name, tensor in zip(program.names, tensors, strict=True):
        if name in program.gradients:
            values[f"gradient of {name}"] = tensor.grad
    return values


def _upstream(output: Tensor) -> Tensor:
    """What backward starts with: different numbers for the rows, 1 for a scalar."""
    return torch.linspace(0.5, 1.5, output.numel()).view(output.shape).to(output.dtype)


def differs(program: Program, got: Values, eager: Values, exact: Values) -> str:
    """Why ``got`` is wrong: a dtype or shape that is not eager's, or more than twice eager's error.

    The errors are compared by :func:`tests.support.numerics.assert_close`; indices and counts have
    to be exact wherever eager's are.
    """
    if got.keys() != eager.keys():
        return f"{len(got)} values for {len(eager)}"
    others = functools.cache(lambda: _in_other_orders(program, list(eager)))
    found = []
    for name, ours in got.items():
        theirs, true = eager[name], exact[name]
        if _kind(ours) != _kind(theirs):
            found.append(f"{name}: {_kind(ours)} for {_kind(theirs)}")
        elif ours is not None and theirs is not None and true is not None:
            dtype = program.dtype if ours.is_floating_point() else torch.float64
            spread = functools.partial(_column, others, name)
            try:
                assert_close([ours], [theirs], [true], dtype, spread)
            except AssertionError as error:
                found.append(f"{name}: " + str(error).removeprefix("value 0: "))
    return "; ".join(found)


def _in_other_orders(program: Program, names: list[str]) -> list[Values]:
    """Eager's values where the products of the head are summed in other orders; none where the
    second operand is not a weight ``[V, D]``."""
    x, weight, *rest = program.tensors()
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return []

    def again(x: Tensor, weight: Tensor) -> list[Tensor]:
        leaves = [t.detach() for t in (x, weight, *rest)]
        for name, leaf in zip(program.names, leaves, strict=True):
            leaf.requires_grad_(name in program.gradients)
        values = _run(program, program.function, leaves)
        # a placeholder for a gradient that there is not
        return [torch.zeros(()) if v is None else v for v in values.values()]

    answers = in_other_orders(again, x.detach(), weight.detach())
    return [dict(zip(names, answer, strict=True)) for answer in answers]


def _column(others: Callable[[], list[Values]], name: str) -> list[list[Tensor]]:
    values = [answer[name] for answer in others()]
    return [[value] for value in values if value is not None]


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype)[6:]}{list(value.shape)}"


# ---------------------------------------------------------------- what is left in the graph


@dataclass
class _Graphs:
    left: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


_listening: list[_Graphs] = []


@contextmanager
def _listed_in(found: _Graphs) -> Iterator[None]:
    """Collects what :func:`counting` sees, for a ``with`` block."""
    _listening.append(found)
    try:
        yield
    finally:
        _listening.remove(found)


def counting(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The inner backend: ``aot_eager``, and a run of the graph that lists its large tensors."""
    graph = copy.deepcopy(gm)
    graph.graph.eliminate_dead_code()  # as AOTAutograd does
    reason = break_reason(getattr(gm, "compile_subgraph_reason", None))
    for found in _listening:
        found.breaks += [reason] * bool(reason)
    compiled = registry.lookup_backend("aot_eager")(gm, inputs)
    seen = False

    def call(*args: Any) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            sizes = _Large(graph)
            sizes.run(*(a.detach().clone() if isinstance(a, Tensor) else a for a in args))
            for found in _listening:
                found.left += sizes.names
        return compiled(*args)

    return call


class _Large(fx.Interpreter):
    """Runs a graph; ``names`` has the function that makes each tensor of the logits' size."""

    def __init__(self, gm: fx.GraphModule, outer: _Large | None = None) -> None:
        super().__init__(gm)
        self.names: list[str] = outer.names if outer else []
        # the storages, which have to stay alive
        self.known: dict[int, Any] = outer.known if outer else {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is CHECKPOINT:
            nested, *inputs = args
            return _Large(nested, self).run(*inputs)
        if target is INVOKE:
            nested, _, *inputs = args
            return _Large(nested, self).run(*inputs)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        for tensor in pytree.tree_leaves(made):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self.known:  # a view, or written in place
                continue
            self.known[storage._cdata] = storage
            large = storage.nbytes() > LARGE * tensor.itemsize
            if large and n.op not in ("placeholder", "get_attr") and not _operator(n):
                self.names.append(_short(n))
        return made


def _operator(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "fxpass"


def _short(node: fx.Node) -> str:
    """``log_softmax`` for the function, method or operator of that name."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


if INNER not in registry._COMPILER_FNS:
    registry.register_backend(counting, name=INNER)
