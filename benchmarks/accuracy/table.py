"""The accuracy table: rows of :mod:`benchmarks.accuracy.cases` as markdown, and failures.

In: setting → provider → row; the row EXACT has float64's values, rounded. Out: one text, and one
line for each number in which fusedce is less accurate than eager.
"""

from __future__ import annotations

import datetime
import math
import platform

import torch

from benchmarks.accuracy.cases import SCALE, Row, Setting
from benchmarks.accuracy.schemes import HIDDEN, SCHEMES

Rows = dict[Setting, dict[str, Row]]

EXACT = "float64, rounded"
# fusedce's error may be FACTOR times the larger of eager's error and the error of rounding float64
# (which eager may undercut by chance), plus one unit in the last place of f32.
FACTOR = 1.05
LAST_DIGIT = 2.0**-23


def worse(rows: Rows) -> list[str]:
    """One line for each number in which fusedce is less accurate than eager, with their ratio.

    The share of zeros is compared too, because a zero is an element that underflowed. A setting in
    which fusedce or eager did not run has a line as well, since it was not checked.
    """
    found = []
    for setting, row in rows.items():
        missing = [who for who in ("eager", "fusedce") if who not in row]
        failed = [f"{who}: {row[who].failure}" for who in row if row[who].failure]
        failed = [line for line in failed if line.startswith(("eager", "fusedce"))]
        if missing or failed:
            why = "; ".join([*(f"{who} was not run" for who in missing), *failed])
            found.append(f"{setting}: not checked, {why}")
            continue
        for what, ours in row["fusedce"].errors.items():
            eager, least = row["eager"].errors[what], row[EXACT].errors[what]
            if not ours <= FACTOR * max(eager, least) + LAST_DIGIT:
                found.append(f"{setting}: {what} {_against(ours, eager)}")
        for what, ours in row["fusedce"].zeros.items():
            eager, least = row["eager"].zeros[what], row[EXACT].zeros[what]
            if not ours <= FACTOR * max(eager, least):
                found.append(f"{setting}: share of zeros in {what} {_against(ours, eager)}")
    return found


def _against(ours: float, eager: float) -> str:
    return f"{ours:.3g}, eager {eager:.3g}, {_ratio(ours, eager)} times"


def _ratio(ours: float, eager: float) -> str:
    return f"{ours / eager:.3g}" if eager else ("1" if ours == 0 else "inf")


def table(rows: Rows, n: int, d: int, v: int, command: str) -> str:
    """The whole file."""
    parts = ["# Accuracy", _about(n, d, v, command), "## fusedce / eager", _ratios(rows)]
    for setting, row in rows.items():
        parts += [f"## {setting}", section(row)]
    return "\n\n".join(parts) + "\n"


def _about(n: int, d: int, v: int, command: str) -> str:
    capabilities = torch.cpu.get_capabilities()
    name = capabilities.get("cpu_name") or platform.machine()
    cpu = f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    missing = [
        what
        for what, flags in {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16",)}.items()
        if not any(capabilities.get(flag) for flag in flags)
    ]
    if missing:
        cpu += f", no {' or '.join(missing)} instructions"
    return f"""\
Relative errors against float64, `|a - b| / |b|` with norms in float64: of the loss and of the
gradients of the hidden states and of the weight (dX, dW) of a mean cross-entropy after a linear,
N={n}, D={d}, V={v}. The underflow of an fp16 gradient depends on N and V, so these two are a real
model's; D is small because CPUs without fp16 instructions multiply fp16 slowly. Providers that take
rows in chunks sized by D (Liger's scheme and core's operator) get the chunks of D={HIDDEN}.
Hidden states and logits are normally distributed with variance 1, targets uniform.

- Without autocast, operands are of the named dtype. With it, hidden states and weight are f32, and
  the compiled function runs in autocast. In both, they hold numbers that the dtype has, so what
  differs is how the loss is computed.
- GradScaler is `torch.amp.GradScaler("cpu", init_scale={SCALE:.0f})`: the loss is scaled, the
  gradients are unscaled by `unscale_`. That refuses fp16 gradients, so without autocast the
  leaves are f32 and the program casts them.
- *{EXACT}*: float64's loss as f32, and its gradients (scaled, if there is a scaler) as the
  named dtype, rounded once: what a gradient of that dtype can be at best, and the share of zeros
  that it must have. A gradient that arrives at an f32 leaf may be better where nothing rounds it on
  the way: fusedce's is f32, and Inductor does not round f32 to the dtype of autocast and back.
- Zeros are the share of exact zeros in dX and dW.
- *Liger's scheme* is what Liger 0.8.5 rounds, and when, in plain PyTorch (the kernels need a GPU);
  `benchmarks/accuracy/schemes.py` says how it was compared with Liger itself. Liger's patched
  models use `reduction="sum"` under a Trainer that passes the number of tokens, else "mean".
- core's operator does not know of autocast: it computes in f32 there.

Written by `{command}`, {datetime.date.today()}:
CPU ({cpu}), torch {torch.__version__}."""


def _ratios(rows: Rows) -> str:
    lines = ["| setting | loss | dX | dW |", "|---|---|---|---|"]
    for setting, row in rows.items():
        eager, ours = row.get("eager", Row()), row.get("fusedce", Row())
        if not eager.errors or not ours.errors:
            continue
        cells = [_ratio(ours.errors[what], eager.errors[what]) for what in ("loss", "dx", "dw")]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    found = worse(rows)
    verdict = (
        f"fusedce is nowhere worse than eager: every error is at most {FACTOR} times the larger\n"
        "of eager's and of rounding alone, plus one unit in the last place of f32."
    )
    return "\n".join(lines) + "\n\n" + ("\n".join(f"- {line}" for line in found) or verdict)


def section(row: dict[str, Row]) -> str:
    """One setting's rows; a provider that raised has the first line of its error."""
    lines = [
        "| provider | loss | dX | dW | dW / eager | zeros in dX | zeros in dW |",
        "|---|---|---|---|---|---|---|",
    ]
    for who, one in row.items():
        label = SCHEMES[who].label if who in SCHEMES else f"*{who}*"
        if one.failure:
            lines.append(f"| {label} | {_escaped(one.failure)} | | | | | |")
            continue
        ratio = "-"
        if who in SCHEMES and "eager" in row and row["eager"].errors:
            ratio = _ratio(one.errors["dw"], row["eager"].errors["dw"])
        errors = [_number(one.errors[what]) for what in ("loss", "dx", "dw")]
        zeros = [_percent(one.zeros[what]) for what in ("dx", "dw")]
        lines.append("| " + " | ".join([label, *errors, ratio, *zeros]) + " |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else str(value)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g} %"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
