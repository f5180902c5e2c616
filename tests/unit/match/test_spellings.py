"""Every row of every table of the matcher, in every way that Python lets one write its call.

The calls are made from signatures (:mod:`tests.fuzz.spellings`): by position, by keyword, with the
keywords in another order. Those that eager runs, compiled, give eager's values and gradients, fused
or declined. All calls of one row stand in one program, each with logits of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from fxpass.graph.functions import CASTS
from fxpass.lower.pointwise import POINTWISE
from fxpass.match.linears import LINEARS
from fxpass.match.losses import LOSSES
from fxpass.match.reductions import REDUCTIONS
from fxpass.match.views import VIEWS
from tests.fuzz.case import Case, Statement
from tests.fuzz.minimise import minimise
from tests.fuzz.oracle import judge
from tests.fuzz.spellings import calls, name_of, pointwise_calls, spelled, spellings

# torch warns of calls that are legal and odd
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

INPUTS = (
    ("x", "torch.randn(n, 3, 4).requires_grad_()"),
    ("x2", "torch.randn(n * 3, 4).requires_grad_()"),
    ("w", "torch.randn(11, 4).requires_grad_()"),
    ("wt", "torch.randn(4, 11).requires_grad_()"),
    ("b", "torch.randn(11).requires_grad_()"),
    ("t", "torch.randint(7, (n, 3))"),
    ("cw", "torch.rand(11)"),
)
HEAD = "z = F.linear(x, w)"
LOSS = "loss = F.cross_entropy(z.reshape(-1, 11), t.reshape(-1))"
# Of logits of which rows were taken, or whose dimensions stand in another order.
ROWS = (
    "z = z.movedim(z.shape.index(11), -1).reshape(-1, 11)",
    "loss = F.cross_entropy(z, torch.arange(len(z)) % 7)",
)
OPTIONS = {"fusedce.inner": "eager", "fusedce.min_logits_mb": 0, "fusedce.logits": "keep"}


def in_eager(block: Sequence[str]) -> bool:
    """Whether eager runs a block, backward included."""
    env: dict[str, Any] = {}
    try:
        exec(case_of([block]).source(), env)
        env["session"](env["program"], env["inputs"], None)
    except Exception:
        return False
    return True


def case_of(blocks: Iterable[Sequence[str]]) -> Case:
    """One program of several blocks, each of which makes a loss of its own."""
    body, losses = [], []
    for i, block in enumerate(blocks):
        losses.append(f"loss{i}")
        body += [Statement(re.sub(r"\bloss\b", f"loss{i}", line)) for line in block]
    names = ", ".join(name for name, _ in INPUTS)
    outputs = ", ".join(losses)
    session = [f"{names} = inputs()", f"{outputs}, = program({names})", f"backward({outputs})"]
    return Case(
        INPUTS, tuple(body), tuple(losses), tuple(map(Statement, session)), tuple(losses), OPTIONS
    )


def check(target: Any, blocks: Iterable[Sequence[str]], fuses: bool = True) -> None:
    """What eager runs, runs compiled, with the same values and gradients.

    Args:
        target: the spelling.
        fuses: whether at least one of the blocks has to be fused.
    """
    legal = [block for block in blocks if in_eager(block)]
    if not legal and isinstance(target, torch._ops.OpOverload):
        # one of other arguments, such as pow.Scalar of a number and a tensor; releases add some
        assert len(target.overloadpacket.overloads()) > 1 or "nll_loss2d" in str(target)
        return
    assert legal, "eager runs none of them"
    for i in range(0, len(legal), 12):
        case = case_of(legal[i : i + 12])
        if (verdict := judge(case)).failed:
            small = minimise(case, lambda c: judge(c).kind, passes=1)
            pytest.fail(f"{verdict.kind}: {verdict.what}\n{small.stand_alone()}")
    assert counters["fusedce"]["matched"] or not fuses


def ids(targets: Iterable[Any]) -> Any:
    """One parameter for every target, in the same order in every process."""
    return [
        pytest.param(target, id=spelled(target).lstrip("."))
        for target in sorted(targets, key=spelled)
    ]


# ---------------------------------------------------------------- linears

OPERANDS = {
    **{"input": "x", "weight": "w", "bias": "b", "other": "wt", "b": "wt", "mat2": "wt"},
    **{"mat1": "x2", "beta": "1", "alpha": "1", "out_dtype": "torch.float32"},
}
EQUATIONS = {
    **{"nsd,vd->nsv": ("x", "w"), "nsd,dv->nsv": ("x", "wt"), "...d,vd->...v": ("x", "w")},
    **{"vd,nsd->nsv": ("w", "x"), "nd,vd->nv": ("x2", "w"), "nd,dv": ("x2", "wt")},
}


def linear_calls(target: Any) -> Iterable[str]:
    if name_of(target) == "einsum":  # its signature names nothing
        for equation, operands in EQUATIONS.items():
            yield f'{spelled(target)}("{equation}", {", ".join(operands)})'
            yield f'{spelled(target)}("{equation}", [{", ".join(operands)}])'
        return
    if target == "__rmatmul__":
        yield "wt.__rmatmul__(x)"
        return
    for first in ("x", "x2", "b"):
        yield from calls(target, OPERANDS, first)


@pytest.mark.parametrize("target", ids(spellings(LINEARS)))
def test_linears(target):
    check(target, ([f"z = {call}", LOSS] for call in linear_calls(target)))


# ---------------------------------------------------------------- losses

LOSS_ARGUMENTS = {
    **{"target": "t2", "weight": "cw", "size_average": "None", "ignore_index": "3"},
    **{"reduce": "None", "reduction": '"sum"', "label_smoothing": "0.1"},
    **{"dim": "-1", "keepdim": "True", "index": "u", "indices": "u", "sparse_grad": "False"},
    **{"other": "p", "alpha": "1", "b": "(torch.arange(6), t2)"},
}
# What stands before and after the call, whose first argument is ``a``.
LOGITS = ("a = F.linear(x2, w)", "t2 = t.reshape(-1)", "u = t2.unsqueeze(-1)")
LOG_PROBABILITIES = (*LOGITS, "a = a.log_softmax(-1)")
AROUND = {
    **dict.fromkeys(("cross_entropy_loss", "logsumexp"), LOGITS),
    "sub": (*LOGITS, "p = a.gather(-1, u).squeeze(-1)", "a = a.logsumexp(-1)"),
}
# ATen numbers the reductions; its index takes a list.
ATEN_ARGUMENTS = {"reduction": "2"}
INDEX_ARGUMENTS = {"indices": "[torch.arange(6), t2]", "b": "(torch.arange(6), t2)"}


OF_LOSSES = LOSSES.keys() | {"gather", "take_along_dim", "index", "logsumexp", "sub"}


@pytest.mark.parametrize("target", ids(spellings(OF_LOSSES)))
def test_losses(target):
    name, values = name_of(target), LOSS_ARGUMENTS
    if isinstance(target, torch._ops.OpOverload):
        values = values | ATEN_ARGUMENTS
    if name in ("index", "getitem"):
        values = values | INDEX_ARGUMENTS | dict.fromkeys(("other", "idx"), INDEX_ARGUMENTS["b"])
    if name == "sub":
        values = values | {"b": "p", "value": "p"}
    made = calls(target, values, "a")
    before = AROUND.get(name, LOG_PROBABILITIES)
    check(target, ([*before, f"loss = {call}.mean()"] for call in made))


@pytest.mark.parametrize("target", ids(spellings(("nll_loss_forward",))))
def test_the_first_of_two_results(target):
    values = LOSS_ARGUMENTS | ATEN_ARGUMENTS
    made = calls(target, values | {"weight": "None"}, "a")
    blocks = [[*LOG_PROBABILITIES, f"loss = {call}[0].mean()"] for call in made]
    check(target, blocks, fuses="2d" not in str(target))


@pytest.mark.parametrize("target", ids(spellings(("log_softmax", "_log_softmax"))))
def test_log_softmax(target):
    values = {"dim": "-1", "dtype": "torch.float32", "_stacklevel": "3", "half_to_float": "False"}
    picked = "loss = -a.gather(-1, u).mean()"
    check(target, ([*LOGITS, f"a = {call}", picked] for call in calls(target, values, "a")))


# ---------------------------------------------------------------- other reductions

OF_CLASSES = REDUCTIONS.keys() - OF_LOSSES
SUMS = {"dim": "-1", "keepdim": "True", "dtype": "torch.float32"}


@pytest.mark.parametrize("target", ids(spellings(OF_CLASSES)))
def test_reductions(target):
    """Beside a log-sum-exp; sums of logits, and amax with gradients, are not read."""
    rows = "a = a if isinstance(a, torch.Tensor) else a.values"
    blocks = (
        ["b = F.linear(x2, w)", f"a = {first}", f"a = {call}", rows, *LOSS_OF_ROWS]
        for first in ("b.log_softmax(-1)", "b * 2", "(b * 2).detach()")
        for call in calls(target, SUMS, "a")
    )
    check(target, blocks, fuses="max.default" not in str(target))


LOSS_OF_ROWS = ("loss = (a.float() + b.logsumexp(-1).sum()).sum()",)

# ---------------------------------------------------------------- views

SHAPES = {
    **{"shape": "(6, 11)", "size": "(6, 11)", "start_dim": "0", "end_dim": "1", "dim": "1"},
    **{"sizes": "(1, -1)", "dim0": "0", "dim1": "1", "axis0": "1", "axis1": "0"},
    **{"dims": "(1, 0, 2)", "source": "0", "destination": "1", "start": "0", "length": "1"},
    **{"index": "1", "memory_format": "torch.contiguous_format", "b": "(slice(None), 1)"},
    **{"end": "2", "step": "2", "indices": "[None, torch.tensor([1, 0])]"},
}
OTHER_SHAPES = (
    SHAPES | {"shape": "6, 11", "size": "6, 11", "dims": "1, 0, 2", "dim": "0", "b": "slice(1)"},
    SHAPES | {"index": "torch.tensor([1, 0])", "dim": "-2", "b": "(Ellipsis, slice(9), slice(11))"},
    SHAPES | {"dim0": "-1", "dim1": "-2", "dims": "(2, 1, 0)", "source": "-1", "sizes": "(-1, 3)"},
    {"size": "(2, 3, 11)"},
)


def movement_calls(target: Any) -> Iterable[str]:
    if target is getattr:
        yield from ("z.mT", "z[0].T", 'getattr(z, "mT")')
        return
    for values in (SHAPES, *OTHER_SHAPES):
        for first in ("z", "z[:1]", "z[0]"):
            yield from calls(target, values, first)


@pytest.mark.parametrize("target", [getattr, *ids(spellings(VIEWS))])
def test_views(target):
    check(
        target,
        ([HEAD, f"z = {call}", *ROWS] for call in dict.fromkeys(movement_calls(target))),
        fuses="squeeze.default" not in str(target),
    )


# ---------------------------------------------------------------- casts

CAST_ARGUMENTS = {
    **{"dtype": "torch.bfloat16", "other": "x2", "device": '"cpu"', "non_blocking": "False"},
    **{"copy": "True", "memory_format": "torch.preserve_format", "layout": "torch.strided"},
}


@pytest.mark.parametrize("target", ids(spellings(CASTS - {"cuda"})))
def test_casts(target):
    made = [*calls(target, CAST_ARGUMENTS, "z"), "z.to(torch.float32, copy=True)"]
    check(target, ([HEAD, f"z = {call}.float()", LOSS] for call in made))


# ---------------------------------------------------------------- functions of one logit


@pytest.mark.parametrize("target", ids(spellings(POINTWISE)))
def test_pointwise(target):
    check(target, ([HEAD, f"z = {call}", LOSS] for call in pointwise_calls(target)), fuses=False)


@pytest.mark.parametrize("target", ids(spellings(POINTWISE, in_place=True)))
def test_in_place(target):
    """The result is used, or thrown away; the logits, what they come from, or what is read."""
    check(
        target,
        (
            block
            for call in pointwise_calls(target)
            for block in (
                [HEAD, f"z = {call}", LOSS],
                [HEAD, call, LOSS],
                [HEAD, "a = z * 1", call, LOSS.replace("z.", "(z + a).")],
                [f"{HEAD}.detach()", call, LOSS],
            )
        ),
        fuses=False,
    )


# ---------------------------------------------------------------- inplace=True

PARAMETERS = {
    **{"p": "0.5", "training": "True", "inplace": "True", "lower": "0.1", "upper": "0.3"},
    **{"threshold": "0.5", "value": "0.25", "negative_slope": "0.1", "alpha": "1.0"},
    **{"min_val": "-1.0", "max_val": "1.0"},
}


def has_inplace(function: Any) -> bool:
    try:
        return "inplace" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


FUNCTIONS = [
    getattr(F, name)
    for name in dir(F)
    if callable(getattr(F, name)) and not name.startswith("_") and has_inplace(getattr(F, name))
]


@pytest.mark.parametrize("function", ids(FUNCTIONS))
def test_every_function_with_an_inplace_parameter(function):
    """Of hidden states or logits, before and after the linear, its result used or thrown away."""
    assert FUNCTIONS

    def blocks() -> Iterable[Sequence[str]]:
        for call in calls(function, PARAMETERS, "a"):
            yield "a = x * 1", f"h = {call}", "z = F.linear(h, w)", LOSS
            yield "a = x * 1", call, "z = F.linear(a, w)", LOSS
            yield "a = x.detach() * 1", "z = F.linear(a, w)", call, LOSS
            yield "a = F.linear(x, w)", f"z = {call}", LOSS
            yield "a = F.linear(x, w)", call, "z = a", LOSS
            yield "z = F.linear(x, w)", "a = z.view(-1)", call, LOSS

    check(function, blocks(), fuses=False)
