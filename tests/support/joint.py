"""Runs a program through the pass on the joint graph, and says what it captured and what is wrong.

In: a row and a way. Out: a :class:`Captured`: the calls, why heads were declined, what is left of the
logits' size in the joint graphs, and what is not as eager has it::

    found = captured(row, "dynamic")
    found.whole, found.wrong
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._dynamo import config
from torch.utils import _pytree as pytree

from fxpass.rows.aten_calls import VIEWS
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.rows.sizes import all_backed, example, numel, packet
from tests.programs.row import Function, Row
from tests.support.oracle import differs, run
from tests.support.ways import WAYS


@dataclass(frozen=True)
class Captured:
    """What the pass made of a program.

    Attributes:
        calls: how many calls its graphs have.
        declined: why heads are left as they are.
        large: the nodes beside the calls whose tensors are as large as logits.
        wrong: what is not as eager has it.
    """

    calls: int
    declined: tuple[str, ...]
    large: tuple[str, ...]
    wrong: str

    @property
    def whole(self) -> bool:
        """Whether no logits exist."""
        return bool(self.calls) and not self.declined and not self.large


def captured(row: Row, way: str) -> Captured:
    """Compiles a program by the pass alone, and runs it."""
    rows, of = RowsPass(), WAYS[way]

    def compiled(function: Function) -> Function:
        return torch.compile(function, backend=rows.backend(), dynamic=of.dynamic)

    torch._dynamo.reset()
    with warnings.catch_warnings(), config.patch(**row.dynamo):
        warnings.simplefilter("ignore")  # of torch about what it deprecates
        eager = run(row, of, row.program())
        function = of.spell(row, compiled) if of.spell else compiled(row.program())
        wrong = "; ".join(differs(row, of, run(row, of, function), eager))
    torch._dynamo.reset()
    return Captured(
        sum(one.calls for one in rows.made),
        tuple(why for one in rows.made for why in map(str, one.declined)),
        tuple(name for one in rows.made for name in _large(one, row.sizes.v * row.sizes.d)),
        wrong,
    )


def _large(one: Rewritten, limit: int) -> list[str]:
    """The nodes that make a tensor of more than ``limit`` elements; gradients that leave are none."""
    return [
        node.name
        for node in one.graph.graph.nodes
        if node.op == "call_function" and packet(node) not in VIEWS
        if getattr(node.target, "namespace", "") != "fxpass"
        for tensor in pytree.tree_leaves(example(node))
        if isinstance(tensor, Tensor) and all_backed(tensor.shape) and numel(tensor.shape) > limit
        if not all(user.op == "output" for user in node.users) or not node.users
        if "getitem" not in node.name
    ]
