"""Several reductions of one head, in whatever order they are written: one call of the operator."""

from __future__ import annotations

from tests.programs.row import FORMULA, REGION, Row
from tests.support.pairs import pairs

KIND = "orders"

TRANSFORMS = {
    "soft-cap": "3 * torch.tanh(s / 3)",
    "masked rows": "s.masked_fill(temperatures.view(B, T, 1) > 1, 0.0)",
    "masked classes": "s.masked_fill(banned, -5.0)",
    "a factor of each row": "s * values.view(B, T, 1)",
}
SUMS = {
    "mean": "y.log_softmax(-1).mean()",
    "squares": "y.softmax(-1).square().sum(-1).mean()",
    "soft targets": "-(teacher.view(B, T, V) * y.log_softmax(-1)).sum(-1).mean()",
}
OTHERS = {
    "cross-entropy": "F.cross_entropy(y.flatten(0, 1), labels)",
    "entropy": "-(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean()",
    "maximum": "y.max(-1).values.mean()",
    "accuracy": "(y.argmax(-1) == tokens).float().mean()",
    "logit": "y.gather(-1, tokens[..., None]).mean()",
}


def in_order(transform: str, sums: str, other: str, reversed_: bool) -> Row:
    first, last = (other, sums) if reversed_ else (sums, other)
    texts = SUMS | OTHERS
    text = f"y = {TRANSFORMS[transform]}; {texts[first]} + {texts[last]}"
    becomes = REGION if "maximum" in (first, last) else FORMULA  # whose gradient is at one class
    return Row(f"{first}, then {last}, of {transform}", text, becomes)


# fmt: off
ONE_CALL = tuple(
    in_order(*case) for case in pairs(
        transform=TRANSFORMS, sums=SUMS, other=OTHERS, reversed_=(False, True)))
ROWS = (
    *ONE_CALL,
    # Where the cap makes logits equal, the class of the largest is another.
    Row("the maximum of a function of other logits",
        "y = torch.tanh(1e6 * z); (F.cross_entropy(z, labels), y.argmax(-1))", REGION),
    # The last call stands after the row that it reads.
    Row("an operand that another call moves",
        "sums = (teacher.mT.mT * z.log_softmax(-1)).sum(-1); row = z.logsumexp(-1); "
        "log_probs = torch.sigmoid(z - row.unsqueeze(-1).detach()).log_softmax(-1); "
        "last = (log_probs * teacher.mT.mT).sum(-1); "
        "sums.sum() + row.sum() + last.square().mean()", REGION),
)
