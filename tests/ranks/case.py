"""What ranks compute and what it is compared with: the one record of all tables of this folder.

In: a :class:`Case`, a row of a table. Out: each rank's :class:`Found`, by :func:`ran`, and a failed
assertion where they are not what the case says, by :func:`check`. The values of all ranks together
are as accurate as those of one process, by the policy of :mod:`tests.support.numerics`.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.numerics import FLOOR, Answer, assert_close, error, in_other_orders

Values = dict[str, Tensor]
Join = Callable[[str, list[Tensor]], Tensor]


@dataclass
class Found:
    """What one rank did.

    Attributes:
        values: by way, whole tensors on the CPU.
        facts: what the fused step says of itself, and ``matched``, ``rejected``, ``casts``,
            ``graphs`` of Dynamo, ``parts`` that AOTAutograd compiled.
        said: what fxpass logged.
        dumps: the graphs after the rewrite.
        exchanges: the bytes of a rank's tensors in each collective of forward and, after ``|``, of
            backward, but for those inside calls. Without a name it is an all_reduce.
    """

    values: dict[str, Values] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    dumps: list[str] = field(default_factory=list)
    exchanges: str = ""


def same(name: str, parts: list[Tensor]) -> Tensor:
    """All ranks that have a value have the same."""
    for part in parts[1:]:
        assert torch.equal(part.nan_to_num(), parts[0].nan_to_num()), f"ranks differ in {name}"
    return parts[0]


def as_in_one_process(case: Case, each: list[Found]) -> None:
    """The values of all ranks together. Those of 16 bits are as exact as eager's on ranks."""
    assert case.alone is not None
    exact = case.alone(torch.float64)
    found = {way: joined(case, each, way) for way in case.ways}
    on_ranks = case.dtype.itemsize == 2 and "eager" in case.ways
    eager = found.pop("eager") if on_ranks else case.alone(case.dtype)
    for way, got in found.items():
        assert got.keys() == exact.keys(), way
        for name in exact:
            ours, theirs, true = ([some[name]] for some in (got, eager, exact))
            try:
                assert_close(ours, theirs, true, case.dtype, lambda name=name: case.others(name))
            except AssertionError as wrong:
                raise AssertionError(f"{way}: {name}: {wrong}") from wrong


def as_eager(case: Case, each: list[Found]) -> None:
    """Each rank's values are those of eager on this rank."""
    for rank in each:
        eager, fused = rank.values["eager"], rank.values["fused"]
        assert eager.keys() == fused.keys()
        for name, value in fused.items():
            assert error(value, eager[name]) < 4 * FLOOR[case.dtype], name


def as_said(case: Case, each: list[Found]) -> None:
    """No values."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program of several ranks.

    Attributes:
        step: what a rank does, and the values that it has then.
        world: the number of ranks.
        alone: what one process computes, in a dtype: float64, or ``dtype``.
        dtype: of the products.
        ways: in which the step is done: ``eager``, ``traced`` by Dynamo and compiled by nobody,
            ``aot_eager``, and at last ``fused``, of which the facts are.
        options: of the backend.
        facts: what has to be among :attr:`Found.facts`; a function is given the rank.
        says, conceals: parts of what is logged, and of what is not.
        dumps: parts of the graphs after the rewrite.
        exchanges: as :attr:`Found.exchanges`, the same on each rank, or whether they are right; not counted
            without.
        join: what the ranks' values of a name are together.
        check: of the values.
        others: eager's values in other orders of summation, by name.
    """

    step: Callable[[Rank], Values]
    world: int = 2
    alone: Callable[[torch.dtype], Values] | None = None
    dtype: torch.dtype = torch.float32
    ways: tuple[str, ...] = ("fused",)
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    conceals: tuple[str, ...] = ()
    dumps: tuple[str, ...] = ()
    exchanges: str | Callable[[str], bool] | None = None
    join: Join = same
    check: Callable[[Case, list[Found]], None] = as_in_one_process
    others: Callable[[str], Iterable[Answer]] = lambda name: ()


def joined(case: Case, each: list[Found], way: str) -> Values:
    """One way's values of all ranks together."""
    names = dict.fromkeys(name for rank in each for name in rank.values[way])
    parts = {name: [rank.values[way].get(name) for rank in each] for name in names}
    return {n: case.join(n, [p for p in some if p is not None]) for n, some in parts.items()}


def in_orders(
    run: Callable[[Tensor, Tensor], Values], x: Tensor, weight: Tensor
) -> Callable[[str], Iterable[Answer]]:
    """:attr:`Case.others` of what ``run(x, weight)`` returns, in orders of the hidden size."""

    @functools.cache
    def runs() -> list[Answer]:
        return in_other_orders(lambda *two: [*run(*two).values()], x, weight)

    names = functools.cache(lambda: [*run(x, weight)])
    return lambda name: ([values[names().index(name)]] for values in runs())


def check(case: Case, each: list[Found]) -> None:
    """What the ranks did is what the case says."""
    for number, rank in enumerate(each):
        said, dumped = "\n".join(rank.said), "\n".join(rank.dumps)
        facts = {k: f(number) if callable(f) else f for k, f in case.facts.items()}
        assert {k: rank.facts.get(k) for k in facts} == facts, said
        assert all(part in said for part in case.says), said
        assert not any(part in said for part in case.conceals), said
        assert all(part in dumped for part in case.dumps), dumped
        if callable(case.exchanges):
            assert case.exchanges(rank.exchanges), rank.exchanges
        elif case.exchanges is not None:
            assert rank.exchanges == case.exchanges, rank.exchanges
    case.check(case, each)


# ---------------------------------------------------------------- on a rank


class Rank:
    """What a step is given: where it is, and how to compile, go backward and take down facts."""

    def __init__(self, case: Case, rank: int, world: int, device: torch.device) -> None:
        self.case, self.rank, self.world, self.device = case, rank, world, device
        self.facts: dict[str, Any] = {}
        self.way, self.dumps = "", ""
        self.exchanged: tuple[list[str], ...] = ([], [])

    def compile(self, program: Any, method: bool = False, **more: Any) -> Any:
        """A module or function as this way does it; by its own method where it has one."""
        backend = {"traced": "eager", "fused": "fusedce"}.get(self.way, self.way)
        if backend == "eager" and self.way == "eager":
            return program
        if backend == "fusedce":
            options = {"fusedce.inner": "aot_eager", **self.case.options}
            more["options"] = {**options, "fusedce.dump": self.dumps}
        if not method:
            return torch.compile(program, backend=backend, **more)
        program.compile(backend=backend, **more)
        return program

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """After which no exchange is counted."""
        calls = self.exchanged[0]
        before = len(calls)
        loss.backward(gradient)
        self.exchanged = calls[:before], calls[before:]

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.world,))

    def move(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """To this rank's device."""
        return [tensor.to(self.device) for tensor in tensors]


def ran(case: Case, rank: int, world: int, device: torch.device) -> Found:
    """A rank does the step of a case, in all its ways."""
    found = Found()
    for way in case.ways:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        here = Rank(case, rank, world, device)
        counted = Counted() if case.exchanges is not None else nullcontext()
        with tempfile.TemporaryDirectory() as here.dumps, said_by_fxpass() as found.said:
            here.way = way
            with counted as exchanged:
                here.exchanged = [] if exchanged is None else exchanged, []
                values = case.step(here)
            found.dumps = [p.read_text() for p in sorted(Path(here.dumps).rglob("*after*"))]
        found.values[way] = {name: whole(t).detach().cpu() for name, t in values.items()}
        found.exchanges = " | ".join(" ".join(calls) for calls in here.exchanged)
        found.facts = here.facts
    found.facts |= {name: counters["fusedce"][name] for name in ("matched", "rejected", "casts")}
    found.facts["graphs"] = counters["stats"]["unique_graphs"]
    found.facts["parts"] = counters["aot_autograd"]["total"]
    return found


class Counted(TorchDispatchMode):
    """Writes down the collectives of eager operators and compiled graphs."""

    # operations of c10d and their functional forms; of the others some wait, some set up
    NAMES: ClassVar = {
        **{"all_reduce": "", "allreduce": "", "all_gather": "gather:", "allgather": "gather:"},
        **{"reduce_scatter": "scatter:", "all_to_all": "all_to_all:"},
    }

    def __enter__(self) -> list[str]:  # type: ignore[override]
        super().__enter__()
        self.calls: list[str] = []
        return self.calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it will exchange plain tensors
        name = func._schema.name.partition("::")[2].strip("_")
        kinds = [short for start, short in self.NAMES.items() if name.startswith(start)]
        if "c10d" in func.namespace and kinds:
            tensors = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)]
            self.calls.append(f"{kinds[0]}{sum(t.nbytes for t in tensors)}")
        return func(*args, **(kwargs or {}))


def whole(value: Any) -> Any:
    """What the ranks hold together."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def values_of(loss: Tensor, model: nn.Module, **more: Tensor) -> Values:
    """After backward: the loss, and every gradient that there is."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **{n: t.detach() for n, t in more.items()}, **gradients}


@contextmanager
def said_by_fxpass() -> Iterator[list[str]]:
    """The messages of fxpass's loggers."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fxpass")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
