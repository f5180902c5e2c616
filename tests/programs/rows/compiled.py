"""A head over a small body, under every mode of ``torch.compile``."""

from __future__ import annotations

from tests.programs.row import RAISES, Row

KIND = "compiled"
BODY = "h = (2 * x.view(B, T, D)).tanh(); "
LOSS = "F.cross_entropy(F.linear({}, weight).view(-1, V), tokens.view(-1))"
INNER = ("aot_eager", "inductor")

# fmt: off
ROWS = (
    Row("a training step", BODY + LOSS.format("h"), ways=(*INNER, "autocast", "dynamic", "no_grad")),
    Row("frozen hidden states", BODY + LOSS.format("h"), trained=("weight",), ways=("aot_eager",)),
    Row("a frozen head", BODY + LOSS.format("h"), trained=("x",), ways=("aot_eager",)),
    Row("a loss inside a checkpoint",
        "def loss(x):\n"
        f"    {BODY}return {LOSS.format('h')}\n"
        "checkpoint(loss, x, use_reentrant=False)",
        ways=INNER),
    Row("autocast inside",
        f"{BODY}\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        f"    loss = {LOSS.format('h')}\n"
        "loss",
        ways=("aot_eager",)),
    # AOTAutograd computes them once: their backwards read the same saved gradients
    Row("two equal losses",
        f"first, second = ({LOSS.format('x.view(B, T, D)')} for _ in range(2)); "
        "2 * first + 3 * second",
        ways=INNER),
    Row("a target out of range",
        "labels = labels.clone(); labels[0] = V; F.cross_entropy(z, labels)", RAISES,
        ways=("aot_eager",)),
    Row("fewer targets than rows", "F.cross_entropy(z, labels[1:])", RAISES, ways=("aot_eager",)),
)
