"""Graphs with row regions: the operator's operands, what becomes of nodes that read rows, log lines."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpass
from fxpass import testing

B, T, D, V = 2, 6, 8, 67
N = B * T
OPTIONS: dict[str, Any] = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}


def operands() -> list[Tensor]:
    """Hidden states [B, T, D], weight, labels [B, T], a teacher's hidden states and weight."""
    random = torch.Generator().manual_seed(0)
    shapes = (B, T, D), (V, D), (B, T, 5), (V, 5)
    x, weight, y, other = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    labels = torch.randint(V, (B, T), generator=random)
    return [x.requires_grad_(), weight.requires_grad_(), labels, y, other]


def spread(z: Tensor) -> Tensor:
    """Rows of logits by no known formula."""
    return z.sort(-1, descending=True).values[..., :40].logsumexp(-1)


def graph(program: Any, *tensors: Any) -> list[str]:
    """The lines of the rewritten graph, without the region's text."""
    text = testing.rewritten(program, *(tensors or operands()))
    return re.sub(r"region='.*?'", "region", text).split("\n")


def functions(lines: list[str]) -> list[str]:
    """The functions that are called."""
    found = [re.search(r"= ([\w.]+)\(", line) for line in lines]
    return [match[1] for match in found if match]


def check(program: Any, *tensors: Any, dynamic: bool | None = None) -> None:
    """Asserts that values and gradients are eager's."""
    compiled = torch.compile(program, backend="fusedce", options=OPTIONS, dynamic=dynamic)
    results = []
    for function in (program, compiled):
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in operands()]
        made = function(*given)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        if trained := [t for t in outputs if t.requires_grad]:
            torch.autograd.backward([t.sum() for t in trained])
        results.append([*(t.detach() for t in outputs), given[0].grad, given[1].grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------- operands


def shifted(x, weight, labels, y, other):
    picks = labels[:, 1:, None]
    z = F.linear(x, weight)[:, :-1]
    return spread(z) - z.gather(-1, picks).squeeze(-1)


def test_views_of_rows_are_taken_of_the_operands():
    lines = graph(shifted)
    names = functions(lines)
    assert names.count("fxpass.row_region") == 1
    assert not [line for line in lines if re.search(rf"f64\[\d+, \d+, {V}\]", line)]
    call = names.index("fxpass.row_region")
    assert names[:call].count("aten.slice") + names[:call].count("operator.getitem") >= 2
    assert "linear" not in names
    assert "sort" not in names
    check(shifted)


def distilled(x, weight, labels, y, other):
    with torch.no_grad():
        teacher = F.linear(y, other).softmax(-1)
    return F.kl_div(F.linear(x, weight).log_softmax(-1), teacher, reduction="none").sum(-1).mean()


def test_two_heads_are_one_call(caplog):
    lines = graph(distilled)
    assert functions(lines).count("fxpass.row_region") == 1
    assert "linear" not in functions(lines)
    with caplog.at_level(logging.INFO, "fxpass"):
        check(distilled)
    (line,) = [r.getMessage() for r in caplog.records if "fused:" in r.getMessage()]
    assert re.search(r"^fused: .*: region of 2 heads, logits \[12, 67\] and \[12, 67\]: ", line)
    assert "_log_softmax" in line


def frozen(x, weight, labels, y, other):
    return spread(F.linear(x.detach(), weight)) + spread(F.linear(x, weight.detach()))


def test_operands_without_a_gradient_are_detached():
    """An operand of which the region has no gradient must not say that it has one."""

    def scaled(x, weight, labels, y, other):
        z = F.linear(x, weight)
        scale = x[..., :1]
        return spread(z * scale.detach()), (z.sort(-1).values.argmax(-1) * scale[..., 0]).sum()

    check(frozen)
    check(scaled)


@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_sizes(dynamic):
    check(shifted, dynamic=dynamic)
    check(distilled, dynamic=dynamic)
    tensors = operands()
    for tensor in (tensors[0], tensors[2]):
        torch._dynamo.mark_dynamic(tensor, 1)
    assert functions(graph(shifted, *tensors)).count("fxpass.row_region") == 1


def sized(x, weight, labels, y, other):
    z = F.linear(x, weight)
    return spread(z).sum() / z.size(0) + z.shape[-1] * z.sort(-1).values[..., :50].mean()


def test_a_quotient_by_a_symbolic_number_of_classes():
    def program(x, weight, labels, y, other):
        z = F.linear(x, weight).flatten(0, 1)
        smoothed = F.cross_entropy(z, labels.flatten(), label_smoothing=0.1)
        return spread(z).sum() + smoothed.sigmoid()

    tensors = operands()
    torch._dynamo.mark_dynamic(tensors[1], 0)
    assert functions(graph(program, *tensors)).count("fxpass.row_region") == 1
    check(program, dynamic=True)


def test_numbers_of_the_logits_are_known_without_them():
    assert "linear" not in functions(graph(sized))
    check(sized)
    check(sized, dynamic=True)


# ---------------------------------------------------------------- places


def logged(x, weight, labels, y, other):
    z = F.linear(x, weight)
    with torch.no_grad():
        first = z.topk(2).values.logsumexp(-1)
        rows = spread(z)
    return spread(z).sum() + rows.sum(), first


def test_rows_read_without_gradients():
    """Where gradients are off, rows have none, whatever the operator's call has."""
    assert "linear" not in functions(graph(logged))
    check(logged)


def after_an_operand(x, weight, labels, y, other):
    z, own = F.linear(x, weight), labels.clone()
    with torch.no_grad():
        rows = F.cross_entropy(z.flatten(0, 1), own.flatten(), reduction="none")
    return spread(z).sum(), rows


def after_another_block(x, weight, labels, y, other):
    z = F.linear(x, weight)
    with torch.no_grad():
        own = y.sum(-1, keepdim=True)
    with torch.no_grad():
        rows = spread(z * own)
    return spread(z).sum(), rows


@pytest.mark.parametrize("program", [after_an_operand, after_another_block])
def test_a_call_with_gradients_stands_before_they_are_switched_off(program, caplog):
    lines = graph(program)
    assert "linear" not in functions(lines)
    check(program)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def evaluated(x, weight, labels, y, other):
    with torch.no_grad():
        return spread(F.linear(x, weight)), F.linear(x, weight).topk(3).indices.eq(3).any(-1)


def test_rows_read_without_gradients_before_they_are_read_with_them():
    def program(x, weight, labels, y, other):
        z = F.linear(x, weight).sort(-1).values
        with torch.no_grad():
            constant = z + z.tanh()
        return (constant.softmax(-1) * z).var(-1)

    assert functions(graph(program)).count("fxpass.row_region") == 1
    check(program)


def test_no_gradients():
    text = testing.rewritten(evaluated, *operands())
    assert set(re.findall(r"trained=(\S*) ", text)) == {""}
    check(evaluated)


def several(x, weight, labels, y, other):
    z = F.linear(x, weight)
    rows = spread(z)
    return rows.mean(), rows.amax(), z.std(-1), z.argmax(-1) == labels


def test_rows_that_several_nodes_read():
    assert functions(graph(several)).count("fxpass.row_region") == 1
    check(several)


# ---------------------------------------------------------------- writes


def written_between(x, weight, labels, y, other):
    hidden = x * 1
    z = F.linear(hidden, weight.detach())
    hidden.mul_(2)
    return spread(z), hidden.clone()


def operand_of_rows_written(x, weight, labels, y, other):
    marks = labels.clone()
    picks = F.linear(x, weight)
    rows = picks.detach().gather(-1, marks[..., None]).squeeze(-1) * 1.5
    marks.zero_()
    return rows.sum() + spread(picks).sum(), marks


def written_and_read_later(x, weight, labels, y, other):
    z = F.linear(x, weight)
    z.mul_(0.5)
    rows = spread(z)
    z[..., 0] = 3.0
    return rows, spread(z)


def written_rows(x, weight, labels, y, other):
    rows = spread(F.linear(x, weight)) + 0.5
    rows.mul_(2).add_(1)
    return rows


def test_an_operand_that_is_written_between_head_and_rows():
    assert "linear" in functions(graph(written_between))
    check(written_between)


def read_before_it_is_written(x, weight, labels, y, other):
    rows = F.linear(x, weight).sort(-1).values[..., :40].sum(-1)
    before = torch.cat([rows, rows * 2])
    rows[:1] = 0
    return rows, before


def written_where_it_is_detached(x, weight, labels, y, other):
    z = F.linear(x, weight)
    picks = z.gather(-1, labels[..., None]).squeeze(-1)
    column = picks.unsqueeze(-1)
    picks.detach().mul_(0.5)
    return spread(F.relu(1 + z - column))


def viewed_without_gradients(x, weight, labels, y, other):
    z = F.linear(x, weight)
    with torch.no_grad():
        z = z[:, :-1]
    return spread(z - z.mean(-1, keepdim=True))


@pytest.mark.parametrize(
    "program",
    [read_before_it_is_written, written_where_it_is_detached, viewed_without_gradients],
    ids=lambda f: f.__name__,
)
def test_what_a_region_would_compute_otherwise(program):
    assert "fxpass.row_region" not in functions(graph(program))
    check(program)


@pytest.mark.parametrize(
    "program",
    [operand_of_rows_written, written_and_read_later, written_rows],
    ids=lambda f: f.__name__,
)
def test_writes(program):
    check(program)


def part_of_the_logits_written(x, weight, labels, y, other):
    """The part has too few classes to be logits."""
    z = F.linear(x, weight)
    z[..., 3:9].mul_(2.0)
    return spread(z)


def one_class_written(x, weight, labels, y, other):
    z = F.linear(x, weight)
    z[..., 0].zero_()
    return spread(z)


def part_of_the_sorted_written(x, weight, labels, y, other):
    values = F.linear(x, weight).sort(-1).values
    values[..., :4].zero_()
    return values[..., :60].logsumexp(-1)


def rows_written_that_meet_logits_again(x, weight, labels, y, other):
    z = F.linear(x, weight)
    largest = z.detach().amax(-1, keepdim=True)
    largest.mul_(2)
    return spread(z - largest)


@pytest.mark.parametrize(
    "program",
    [
        *(part_of_the_logits_written, one_class_written, part_of_the_sorted_written),
        rows_written_that_meet_logits_again,
    ],
    ids=lambda f: f.__name__,
)
def test_a_view_without_classes_that_is_written(program):
    check(program)


# ---------------------------------------------------------------- what stays


def test_a_region_of_one_head_beside_a_fused_loss():
    def program(x, weight, labels, y, other):
        loss = F.cross_entropy(F.linear(x, weight).flatten(0, 1), labels.flatten())
        return loss, spread(F.linear(y, other)).mean()

    names = functions(graph(program))
    assert names.count("fxpass.row_region") == 1
    assert names.count("fxpass.class_reductions") == 1
    check(program)


def test_a_total_that_adds_up_the_loss_of_a_later_call():
    """The total is made again for the first call: its addends have the gradients that they had."""

    def program(x, weight, labels, y, other):
        z = F.linear(x, weight[:11])
        loss = F.cross_entropy(z.flatten(0, 1), labels.flatten() % 11)
        product = torch.matmul(z.exp().softmax(-1), weight[:11, :1])
        return loss + product.sum() + product.sign().sum()

    check(program)


def test_a_part_of_the_hidden_states_that_autocast_casts(caplog):
    """The cast has other strides than the hidden states, which have no such view of their rows."""

    def program(x, weight, labels, y, other):
        with torch.autocast("cpu", torch.bfloat16):
            z = F.linear(x[:, :-1], weight)
        return z.softmax(-1).gather(-1, labels[:, 1:, None]).sum()

    x, weight, *others = operands()
    made = graph(program, *(t.detach().float().requires_grad_() for t in (x, weight)), *others)
    assert "linear" not in functions(made)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------- numbers


NUMBERS = {
    "a temperature": lambda z, number, weight: z / number.item(),
    "a bound": lambda z, number, weight: z.clamp(max=number.item()),
    "of the classes": lambda z, number, weight: z / weight.shape[0],
    "of the classes, as a float": lambda z, number, weight: z * weight.shape[0] ** -0.5,
    "of the rows": lambda z, number, weight: z / z.shape[0],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_vary(name, caplog):
    """A number is an operand of arithmetic; a chunk of rows has no size but those of its operands."""

    def program(x, weight, labels, y, other):
        return spread(NUMBERS[name](F.linear(x, weight), labels[0, 0] + 2.5, weight))

    tensors = operands()
    torch._dynamo.mark_dynamic(tensors[0], 0)
    torch._dynamo.mark_dynamic(tensors[1], 0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        names = functions(graph(program, *tensors))
        check(program, dynamic=True)
    assert ("fxpass.row_region" in names) == (name not in ("a bound", "of the rows"))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


BOOLEANS = {
    "of rows": lambda z, labels: z[True].squeeze(0),
    "between rows and classes": lambda z, labels: z[:, True].squeeze(1),
    "after the classes": lambda z, labels: z[..., True].squeeze(-1),
}


@pytest.mark.parametrize("name", BOOLEANS)
def test_an_index_of_one_boolean(name, caplog):
    def program(x, weight, labels, y, other):
        z = BOOLEANS[name](F.linear(x.flatten(0, 1), weight), labels)
        return F.cross_entropy(z, labels.flatten())

    graph(program)
    check(program)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------- logits that are returned

LEAVE = {
    "as they are": lambda z: (spread(z).mean(), z),
    "soft-capped, and of two losses": lambda z: (
        spread(z).mean() + F.cross_entropy(z.flatten(0, 1), torch.zeros(N, dtype=torch.int64)),
        30 * (z / 30).tanh(),
    ),
    "twice": lambda z: (spread(z[:, 1:]).sum(), z.flatten(0, 1), z / 2),
}


@pytest.mark.parametrize("name", LEAVE)
def test_logits_that_leave_are_deferred(name):
    def program(x, weight, labels, y, other):
        return LEAVE[name](F.linear(x, weight))

    (match,) = fxpass.explain(program, *operands()).matches
    assert match.logits_mode == "defer"
    assert "(logits deferred: computed when they are first used)" in str(match)
    assert len([line for line in graph(program) if "row_region(" in line]) == 1
    check(program)


def test_logits_that_leave_beside_those_of_another_head():
    """The graph's outputs are changed twice: by the region, and by the loss with a formula."""

    def program(x, weight, labels, y, other):
        z, z2 = F.linear(x, weight), F.linear(x.tanh(), weight)
        return F.cross_entropy(z2.flatten(0, 1), labels.flatten()), z2, spread(z).mean(), z

    report = fxpass.explain(program, *operands())
    assert [match.logits_mode for match in report.matches] == ["defer", "defer"]
    check(program)


LEFT = {
    "sorted": lambda z: (spread(z).mean(), z.sort(-1).values),
    "a softmax": lambda z: (spread(z), z.softmax(-1)),
    "without a gradient": lambda z: (spread(z.detach()).mean(), z.detach()),
    "less their lse": lambda z: (spread(z).mean(), z - z.logsumexp(-1, True)),
}


@pytest.mark.parametrize("name", LEFT)
def test_logits_that_have_to_exist(name):
    def program(x, weight, labels, y, other):
        return LEFT[name](F.linear(x, weight))

    assert "row_region" not in "\n".join(graph(program))
    check(program)


# ---------------------------------------------------------------- what no moment has


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_probabilities(other, smoothing):
    """They are multiplied into the probabilities, which promotes both."""
    balance = torch.arange(1, V + 1).to(other)

    def program(x, weight, labels, y, other):
        z = F.linear(x, weight).flatten(0, 1)
        soft = F.one_hot(labels.flatten(), V).to(x.dtype) * 0.9 + 0.01
        return F.cross_entropy(z, soft, balance, label_smoothing=smoothing).to(x.dtype)

    lines = graph(program)
    assert functions(lines).count("fxpass.row_region") == 1
    assert not [line for line in lines if "(%soft" in line or "(%z" in line]  # nobody reads them
    check(program)


def test_an_index_that_varies(caplog):
    """The row function may not read a size of no operand: then there is no region, and no warning."""

    def program(x, weight, labels, y, other, index):
        z = torch.stack([F.linear(x, weight), F.linear(x.tanh(), weight)])[index]
        return spread(z).mean()

    compiled = torch.compile(program, backend="fusedce", options=OPTIONS, dynamic=True)
    for index in (1, 0):
        torch.testing.assert_close(compiled(*operands(), index), program(*operands(), index))
    assert not [r for r in caplog.records if r.name.startswith("fxpass") and r.levelno > 20]


# ---------------------------------------------------------------- einsum

EINSUMS = {
    "words": lambda p, z: torch.einsum("btv,btv->bt", p, z),
    "all": lambda p, z: torch.einsum("btv,btv->", p, z),
    "a list": lambda p, z: torch.einsum("btv,btv->bt", [p, z]),
    "no arrow": lambda p, z: torch.einsum("btv,btv", p, z),
    "one operand, no arrow": lambda p, z: torch.einsum("btv", p).sort(-1).values[..., 3],
    "numbers": lambda p, z: torch.einsum(p, [0, 1, 2], z, [0, 1, 2], [0, 1]),
    "autocast": lambda p, z: torch.einsum("btv,btv->bt", p.float(), z.float()).double(),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_sums_of_products_by_einsum(name):
    def program(x, weight, labels, y, other):
        z = F.linear(x, weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            return EINSUMS[name](z.softmax(-1), z)

    fused = "row_region" in "\n".join(graph(program))
    assert fused or name in ("numbers", "autocast", "no arrow", "one operand, no arrow")
    if name != "autocast":  # whose values have 8 bits
        check(program)
