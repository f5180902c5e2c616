"""Several reductions of one head are one call of the operator, in whatever order they are written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import B, S, V, check, head_of, inputs

TARGETS = torch.rand(B, S, V)
ROWS = torch.rand(B, S, 1)
CLASSES = torch.arange(V) % 3 == 0

TRANSFORMS = {
    "soft-cap": lambda z: 3 * torch.tanh(z / 3),
    "masked rows": lambda z: z.masked_fill(ROWS > 0.5, 0.0),
    "masked classes": lambda z: z.masked_fill(CLASSES, -5.0),
    "a factor of each row": lambda z: z * ROWS,
}

SUMS = {
    "mean": lambda z, t: z.log_softmax(-1).mean(),
    "squares": lambda z, t: z.softmax(-1).square().sum(-1).mean(),
    "soft targets": lambda z, t: -(TARGETS.to(z.dtype) * z.log_softmax(-1)).sum(-1).mean(),
}

OTHERS = {
    "cross-entropy": lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()),
    "entropy": lambda z, t: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "maximum": lambda z, t: z.max(-1).values.mean(),
    "accuracy": lambda z, t: (z.argmax(-1) == t).float().mean(),
    "logit": lambda z, t: z.gather(-1, t[..., None]).mean(),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("first", ["sums", "other"])
def test_one_call(first, other, sums, transform):
    def program(x, weight, labels):
        z = transform(F.linear(x, weight))
        if first == "sums":
            return sums(z, labels) + other(z, labels)
        return other(z, labels) + sums(z, labels)

    x, weight, labels = inputs()
    assert len(head_of(program, x, weight, labels).calls) == 1
    check(program, labels, x, weight)


def test_the_maximum_of_a_function_of_other_logits():
    """Where the cap makes logits equal, the class of the largest is another."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        capped = torch.tanh(1e3 * z)
        return OTHERS["cross-entropy"](z, labels), capped.argmax(-1)

    x, weight, labels = inputs()
    assert head_of(program, x, weight, labels).logits_mode == "never"
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    assert torch.equal(fused(x, weight, labels)[1], program(x, weight, labels)[1])


def test_an_operand_that_another_call_moves():
    """The last call stands after the row that it reads."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        sums = (TARGETS.mT.mT * z.log_softmax(-1)).sum(-1)
        row = z.logsumexp(-1)
        log_probs = torch.sigmoid(z - row.unsqueeze(-1).detach()).log_softmax(-1)
        last = (log_probs * TARGETS.mT.mT).sum(-1)
        return sums.sum() + row.sum() + last.square().mean()

    x, weight, labels = inputs()
    assert head_of(program, x, weight, labels).logits_mode == "never"
    check(program, labels, x, weight)
