"""The coverage table: rows of :mod:`benchmarks.coverage.worker` as markdown.

In: the rows, class by class. Out: one text with the totals, the chains by how often they occur, and
a line for every class.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from typing import Any

from benchmarks.about import version

Row = dict[str, Any]

FORMS = ("loss", "model")
FUSED = "fused"
NOT_RUN = "not run"
# first words of an outcome → what it is called in the totals
KINDS = {
    FUSED: "fused, and equal to eager as defined above",
    "not fused": "not fused, with a reason",
    "graph break": "linear and loss in different graphs (Dynamo broke the graph between them)",
    "no loss": "no cross-entropy in any graph",
    "wrong": "fused, but not equal to eager",
    "error": "failed",
    NOT_RUN: "cannot be made, or has no loss for labels, in eager",
}


def outcome(row: Row, form: str) -> str:
    """``fused``, or why not, in one line that starts with a key of ``KINDS``."""
    if row["stage"] != "done":
        return f"{NOT_RUN} ({row['stage']}): {row['error']}"
    result = row["forms"][form]
    if result["errors"]:
        return "error: " + result["errors"][0]
    if result["wrong"]:
        return "wrong: " + result["wrong"]
    if not row["chains"]:
        return "no loss in any graph"
    if any(chain["end"] == "graph break" for chain in row["chains"]):
        breaks = [reason for reason in row["breaks"] if reason]
        return "graph break: " + (breaks[-1] if breaks else "not known")
    if result["rejected"]:
        return "not fused: " + "; ".join(dict.fromkeys(result["rejected"]))
    if len(result["matched"]) < len(row["chains"]):
        return f"not fused: {len(result['matched'])} of {len(row['chains'])} losses"
    if any("(logits kept" in match for match in result["matched"]):
        return f"{FUSED}, with logits kept: something else in the graph reads them"
    if result.get("apart"):
        return f"{FUSED}, equal to Dynamo's graph, which is not equal to eager: {result['apart']}"
    return FUSED


def kind(text: str) -> str:
    """The key of ``KINDS`` that an outcome starts with."""
    return next(key for key in KINDS if text.startswith(key))


def spelled(chain: dict[str, Any]) -> str:
    """A chain without shapes, a method without the tensor it is called on::

    linear → .float() → .view(-1, V) → cross_entropy
    """
    names = [_name(chain["steps"][0])] if chain["end"] == "linear" else ["…"]
    rest = chain["steps"][1:] if chain["end"] == "linear" else chain["steps"]
    calls = [_call(step) for step in rest]
    return " → ".join([*names, *calls, _name(chain["loss"])])


def _name(step: str) -> str:
    return step.partition("(")[0]


def _call(step: str) -> str:
    text = re.sub(r"::?\w+\[[^\]]*\]", "", step)
    return re.sub(r"^(\.\w+)\(_(, )?", r"\1(", text) if text.startswith(".") else text


def table(rows: dict[str, Row], inner: str) -> str:
    """The whole file; ``inner`` is the inner backend."""
    rows = {name: rows[name] for name in sorted(rows)}
    done = [row for row in rows.values() if row["stage"] == "done"]
    losses = [chain for row in done for chain in row["chains"]]
    parts = [
        "# Coverage",
        _about(list(rows.values()), inner),
        "## Totals",
        _totals(list(rows.values())),
        "## Chains",
        f"{len(losses)} losses of {len(done)} classes, as Dynamo spells what is between the linear "
        "and each of them (`_` is the tensor that came from the linear, V the number of classes, "
        "`…` another graph):",
        _chains(done),
        "## Classes",
        _classes(done),
        "## Not run",
        _not_run(list(rows.values())),
    ]
    return "\n\n".join(parts) + "\n"


def _about(rows: list[Row], inner: str) -> str:
    installed = {name: version(name) for name in ("torch", "transformers", "scipy")}
    versions = ", ".join(f"{name} {number}" for name, number in installed.items() if number)
    states = Counter(row.get("fxpass", "not recorded") for row in rows)
    count = ", ".join(f"{state} ({number})" for state, number in states.most_common())
    several = (
        "The rows are from **several states of fxpass**: what fused in one was not run again in "
        "the next, so this does not show that any single one does it all. "
        if len(states) > 1 or "not recorded" in states
        else ""
    )
    return f"""\
What fxpass does with transformers' own classes: every class of the causal-LM, masked-LM,
sequence-to-sequence-LM and image-text-to-text mappings, made from a tiny configuration with random
f32 weights, in training mode with dropout at 0. Models of images or sound get text only, unless
they cannot do without.

Each model is traced once, by a backend of the benchmark that hands the graph to `fusedce`. *Whole
model* is that graph as it is, as in `torch.compile(model, backend="fusedce")(**batch)`; its logits
are then used in the forward and the backward pass. *Loss only* is the same graph with its other
outputs taken out, in place of a step that returns nothing but the loss; it was not traced from one.

Equal means: the loss, the logits and the gradient of every parameter are within 1e-5 of eager's
(relative, in the Frobenius norm), or else within twice eager's own error against float64 plus 2e-6.
A gradient smaller than a thousandth of the largest is measured against that thousandth.

Written by `python -m benchmarks.coverage`, {datetime.date.today()}: CPU, {versions},
inner backend `{inner}`. {several}States of fxpass (a hash of its source) and rows: {count}."""


def _totals(rows: list[Row]) -> str:
    counts = {form: Counter(kind(outcome(row, form)) for row in rows) for form in FORMS}
    lines = ["| outcome | loss only | whole model |", "|---|---|---|"]
    for key, meaning in KINDS.items():
        numbers = [counts[form][key] for form in FORMS]
        if any(numbers):
            lines.append(f"| {meaning} | {numbers[0]} | {numbers[1]} |")
    lines.append(f"| all classes | {len(rows)} | {len(rows)} |")
    return "\n".join(lines)


def _chains(rows: list[Row]) -> str:
    counts = Counter(spelled(chain) for row in rows for chain in row["chains"])
    lines = ["| chain | losses |", "|---|---|"]
    lines += [f"| `{chain}` | {number} |" for chain, number in counts.most_common()]
    return "\n".join(lines)


def _classes(rows: list[Row]) -> str:
    lines = ["| class | chain | loss only | whole model |", "|---|---|---|---|"]
    for row in rows:
        chains = "<br>".join(f"`{c}`" for c in dict.fromkeys(map(spelled, row["chains"])))
        cells = [_cell(outcome(row, form)) for form in FORMS]
        lines.append(f"| {row['name']} | {chains} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _not_run(rows: list[Row]) -> str:
    lines = [f"- {row['name']}: {_cell(row['error'])}" for row in rows if row["stage"] != "done"]
    return "\n".join(lines) or "None."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
