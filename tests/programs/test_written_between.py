"""What the user writes to after a fused forward: results, and operands that eager does not save.
What backward reads of them is as it was, or an error."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.programs.row import Row
from tests.support.numerics import assert_close

X_WEIGHT = ("x", "weight")
RESULT = "the second result"

# name → the program, and what is written: operands, or what it returns
LOSS = "F.cross_entropy({}, labels, reduction='none').square().mean()"
RETURNED = (
    Row("returned logits", f"({LOSS.format('z')}, z, z.argmax(-1))"),
    Row("a bias", f"({LOSS.format('F.linear(x, weight, bias)')}, bias.detach())"),
    Row(
        "hidden states of a frozen head",
        f"h = x * 1; ({LOSS.format('F.linear(h, weight.detach())')}, h.detach())",
    ),
    Row(
        "the weight of frozen hidden states",
        f"({LOSS.format('F.linear(x.detach(), weight)')}, weight.detach())",
    ),
    Row(
        "a weight with z-loss",
        "y = F.linear(x.detach(), weight, bias); lse = y.logsumexp(-1); "
        "(F.cross_entropy(y, labels) + 0.01 * lse.square().mean(), weight.detach())",
    ),
    Row(
        "a weight beside a trained bias",
        f"({LOSS.format('F.linear(x.detach(), weight.detach(), bias)')}, weight.detach())",
    ),
)
SCALED = LOSS.format("F.linear(x * 1, weight * 1, bias)")
# Inductor's partitioner would compute copies and scaled operands again in backward.
SCALED_OPERANDS = {
    "bias x": Row("a frozen weight", SCALED, trained=("x", "bias")),
    "bias weight": Row("frozen hidden states", SCALED, trained=("weight", "bias")),
    "bias x weight": Row("both frozen", SCALED, trained=("bias",)),
}
UNSAVED = {
    "teacher": ("torch.where(z > 0, z, teacher).sum(-1).sin()",),
    # autograd saves the exponential of a log-probability, and not what is returned
    "the first result": ("z.softmax(-1).gather(-1, labels[:, None]).squeeze(-1)",),
}
# Backward computes the logits again, and these; AOTAutograd saves the bias, too.
AGAIN = {
    "bias": "(z.clamp(max=0.5) - bias).logsumexp(1).sin()",
    "teacher": "(z - teacher).logsumexp(-1).sin()",
    # eager saves which logits are larger, a mask as large as the logits
    "labels": "torch.where(z > z.gather(1, labels[:, None]), z, -z).sum(-1).sin()",
}


def doubled(tensor):
    tensor.mul_(3)


def by_numpy(tensor):
    tensor.numpy().fill(0.5)


CASES = [
    *(
        (row, RESULT, doubled, {"logits": ("auto", "keep")[i % 2]})
        for i, row in enumerate(RETURNED)
    ),
    *(
        (row, RESULT, by_numpy, {"logits": ("keep", "auto")[i % 2]})
        for i, row in enumerate(RETURNED)
    ),
    *((row, names, doubled, {"inner": "inductor"}) for names, row in SCALED_OPERANDS.items()),
    *(
        (Row(text, text, trained=X_WEIGHT), name, torch.Tensor.zero_, {})
        for name, texts in UNSAVED.items()
        for text in texts
    ),
]


def compile_with(program, inner="eager", **options):
    options = {"inner": inner, "min_logits_mb": 0, **options}
    return torch.compile(
        program, backend="fusedce", options={f"fusedce.{k}": v for k, v in options.items()}
    )


def gradients(program, row, written, write, wide=False):
    """The sum of the first result, and the gradients after the writes."""
    tensors = row.tensors(wide=wide)
    named = dict(zip(row.names, tensors, strict=True))
    results = pytree.tree_leaves(program(*tensors))
    total = results[0].sum()
    named |= {"the first result": results[0], RESULT: results[-1 if len(results) < 3 else 1]}
    for name in [written] if written in named else written.split():
        write(named[name].detach())
    total.backward()
    return [total.detach(), *(t.grad for t in tensors if t.grad is not None)]


@pytest.mark.parametrize(
    ("row", "written", "write", "options"), CASES, ids=[f"{c[0].name}, {c[1]}" for c in CASES]
)
def test_what_is_written_between_forward_and_backward(row, written, write, options):
    how = row, written, write
    got = gradients(compile_with(row.program(), **options), *how)
    eager = gradients(row.program(), *how)
    assert_close(got, eager, gradients(row.program(wide=True), *how, wide=True), row.dtype)


@pytest.mark.parametrize("name", AGAIN)
def test_a_write_to_what_backward_computes_again_is_an_error(name):
    row = Row("again", AGAIN[name], trained=X_WEIGHT)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(compile_with(row.program()), row, name, torch.Tensor.zero_)


RESULTS = (
    Row("equal rows", "(z.logsumexp(-1), z.logsumexp(-1), z.argmax(-1))"),
    Row("several rows", "(z.logsumexp(-1), z.max(-1).values, z.topk(2).values)"),
    Row(
        "a detached view",
        "y = F.linear(x, weight, bias).view(B, T, V); "
        "picked = y.log_softmax(-1).gather(-1, tokens[..., None]); "
        "(picked, picked.detach(), y.logsumexp(-1))",
    ),
    Row(
        "written in the graph",
        "first, second = z.logsumexp(-1), z.logsumexp(-1); first.add_(1); (first, second, z.amax(-1))",
        trained=(),
    ),
)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("row", RESULTS, ids=lambda row: row.name)
def test_a_write_to_one_result_leaves_the_others(row, inner):
    exact = row.program(wide=True)(*row.tensors(wide=True))
    got, eager = (
        run(*row.tensors()) for run in (compile_with(row.program(), inner), row.program())
    )
    with torch.no_grad():
        for results in (got, eager, exact):
            results[0].add_(1)
    assert_close(got, eager, exact, row.dtype)
    sizes = [[t.untyped_storage().nbytes() for t in results] for results in (got, eager)]
    assert sizes[0] == sizes[1]
