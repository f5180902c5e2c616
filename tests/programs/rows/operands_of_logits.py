"""Logits with operands that are trained, in front of a cross-entropy."""

from __future__ import annotations

from tests.programs.row import NOTHING, REGION, Row

KIND = "operands of logits"

# of ``s``, ``b`` [V], ``c`` [] and ``r`` [B, T, 1]
FORMULAS = {
    "a number per row added": "s + r",
    "a bias of more dimensions": "s + b[None, None]",
    "a bias in place": "s.add_(b)",
    "a bias before a function": "torch.tanh(s + b) * 2",
}
REGIONS = {
    "taken away from a bias": "b - s",
    "two biases": "s + b - b * 3",
    "a bias that cancels": "(s + b).relu() - b + b",
    "a multiple of a bias": "torch.add(s, b, alpha=2)",
    "a temperature with a shape": "s * c.view(1, 1, 1)",
    "a temperature after a bias": "(s + b) / c",
    "a shift and a temperature": "(s + 1) * c",
    "a temperature of a function": "s.relu() * c",
    "in the denominator": "c / (s.square() + 1)",
    "divided by a number per row": "s / r",
    "a temperature before a bias": "s * c + b",
    "a temperature in a function": "(s * c).tanh()",
    "a factor that cancels": "s * c / c",
    "a number per row, then a bias": "s * r + b",
    "a maximum with a tensor": "torch.clamp(s, min=b)",
}
OF = (
    "b = bias; c = temperature; r = temperatures.view(B, T, 1); y = {}; "
    "F.cross_entropy(y.view(-1, V), labels)"
)

ROWS = (
    *(Row(name, OF.format(text)) for name, text in FORMULAS.items()),
    *(Row(name, OF.format(text), REGION) for name, text in REGIONS.items()),
    # the sum of its gradient works along rows
    Row("a bias of transposed logits", OF.format("(s.mT + b[:, None]).mT"), NOTHING),
)
