"""The texts of errors and refusals: one module has them, a page lists them, and code to write instead
is fused."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpass
from fxpass import messages

ROOT = Path(fxpass.__file__).parent
PAGE = ROOT / "REFUSALS.md"
SOURCE = ROOT / "messages.py"
CONSTANTS = {k: v for k, v in vars(messages).items() if k.isupper() and isinstance(v, str)}
# What a user meets; the others check the arguments of the operator, or find formulas.
TOLD = ("rows", "deferred", "rewrite", "casts", "graph", ".")
EXCEPTIONS = {
    *("Stop", "NoMatch", "StaleLogitsError", "MixedDtypeError", "SettingError", "UsageError"),
    *("RuntimeError", "SkipFrame", "IndexError"),
}


def page() -> str:
    """The page, made from the module."""
    lines = [
        "# Why a loss is not fused, and other messages",
        "",
        "Made from [`messages.py`](messages.py). A program that is not fused runs as without fxpass.",
        "",
        "## What to write instead",
        "",
        "`fxpass.explain` prints these lines below the refusal; the warning of a program that computes",
        "deferred logits has them, too.",
    ]
    for refusal, code in messages.INSTEAD.items():
        lines += ["", *textwrap.wrap(f"**{refusal}**", 120), "", "```python", code, "```"]
    names = iter(CONSTANTS.items())
    for heading, count in sections():
        lines += ["", f"## {heading[0].upper()}{heading[1:]}", ""]
        for _ in range(count):
            name, text = next(names)
            lines += textwrap.wrap(f"- `{name}`: {text}", 120, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def sections() -> Iterator[tuple[str, int]]:
    """The headings of the module, each with the number of its constants."""
    parts = re.split(r"^# -{8,} (.*)$", SOURCE.read_text(), flags=re.M)[1:]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        body = ast.parse(text.replace("from __future__ import annotations", "")).body
        assigned = (n.targets[0].id for n in body if isinstance(n, ast.Assign))  # pyright: ignore
        yield heading, sum(name in CONSTANTS for name in assigned)


def test_the_page_has_every_message():
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


def test_every_message_is_used_and_none_stands_twice():
    texts = list(CONSTANTS.values())
    assert len(texts) == len({*texts})
    code = "\n".join(p.read_text() for p in ROOT.rglob("*.py") if p != SOURCE)
    unused = [k for k in CONSTANTS if f"messages.{k}" not in code and k != "MASK_BREAK"]
    assert unused == []


def test_no_message_stands_elsewhere():
    found = []
    for name in TOLD:
        for path in (ROOT / name).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else None
                if isinstance(call, ast.Call) and ast.unparse(call.func) in EXCEPTIONS:
                    texts = [a for a in call.args if isinstance(a, ast.Constant | ast.JoinedStr)]
                    found += [f"{path.name}:{node.lineno}"] * bool(texts)
    assert found == []


# ---------------------------------------------------------------- what to write instead

Program = Callable[..., Tensor]
head = torch.nn.Linear(16, 300)


def loss_alone(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def head_and_loss(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(x).float(), labels)


def masked_labels(x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(head(x), labels.masked_fill(~mask, -100))


def of_masked_rows(x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(head(x)[mask], labels[mask])


def returned(x: Tensor) -> Tensor:
    return head(x)


def rows(n: int = 32, d: int = 16) -> Tensor:
    return torch.randn(n, d, requires_grad=True)


LABELS = torch.arange(32) % 300


@pytest.mark.parametrize(
    ("refusal", "refused", "arguments", "written", "given"),
    [
        (
            messages.ENTERS,
            loss_alone,
            lambda: (rows(d=300), LABELS),
            head_and_loss,
            lambda: (rows(), LABELS),
        ),
        (
            messages.MASK_BREAK,
            of_masked_rows,
            lambda: (rows(), LABELS, LABELS > 3),
            masked_labels,
            lambda: (rows(), LABELS, LABELS > 3),
        ),
    ],
    ids=["head elsewhere", "mask"],
)
def test_a_report_says_what_to_write_instead(
    refusal: str,
    refused: Program,
    arguments: Callable[[], tuple[Any, ...]],
    written: Program,
    given: Callable[[], tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    monkeypatch.setenv("FUSEDCE_INNER", "aot_eager")
    told = str(fxpass.explain(refused, *arguments()))
    for line in messages.INSTEAD[refusal].splitlines():
        assert f"      {line}" in told
    report = fxpass.explain(written, *given())
    assert report.matches
    assert "instead:" not in str(report)


def test_a_model_that_returns_logits_is_told_to_take_labels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    monkeypatch.setenv("FUSEDCE_INNER", "aot_eager")
    monkeypatch.setenv("FUSEDCE_LOGITS", "keep")
    told = str(fxpass.explain(returned, rows()))
    assert messages.INSTEAD[messages.RETURNED].splitlines()[0] in told


def test_a_write_to_the_logits_of_a_model_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    monkeypatch.setenv("FUSEDCE_INNER", "aot_eager")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 300))

    logits = torch.compile(model, backend="fusedce")(rows())
    logits[:, 0] = -torch.inf
    F.cross_entropy(logits, LABELS + 1).backward()
    (told,) = [r.message for r in caplog.records if messages.WRITES_OF_MODEL in r.message]
    assert messages.INSTEAD[messages.WRITES_OF_MODEL].splitlines()[0] in told
