"""TORCH_LOGS=+fxpass: one line for every match, rejection and cast; and the counters."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

OPTIONS = {"fusedce.inner": "eager"}
INPUTS = (torch.ones(4, 8), torch.ones(10, 8, requires_grad=True), torch.zeros(4).long())

PROGRAM = """\
import torch
import torch.nn.functional as F

def f(x, w, target):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(F.linear(x, w), target)
    return loss + F.cross_entropy(F.linear(x, w).cumsum(-1), target)

inputs = torch.ones(4, 8), torch.ones(10, 8, requires_grad=True), torch.zeros(4).long()
torch.compile(f, backend="fusedce", options={"fusedce.inner": "eager"})(*inputs)
"""


def fused(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def mixture(x, w, target):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(F.linear(x, w), target)
    return loss + F.cross_entropy(F.linear(x, w).cumsum(-1), target)


def loss_less(x, w, target):
    return F.linear(x, w).cumsum(-1).sum()


EXPECTED = [
    "fused: train.py:6 loss = F.cross_entropy(F.linear(x, w), target): logits [4, 10], "
    "cross-entropy: log-probability of the label; gradients of weight with the loss",
    "not fused: train.py:7 return loss + F.cross_entropy(F.linear(x, w).cumsum(-1), target): %cumsum (cumsum) "
    "of the logits is not known",
    "cast: %l_x_, %l_w_ float32 -> bfloat16: train.py:6 loss = F.cross_entropy(F.linear(x, w), target)",
]


@pytest.mark.full  # a compile cache of its own
def test_lines_in_a_process_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TORCH_LOGS": "+fxpass"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\w).*fxpass[/\\]\S+\.py:\d+\] (?:\[.*?\] )?(.*)", done.stderr, re.M)
    assert [line for level, line in lines if level == "I"] == EXPECTED


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (fused, {"matched": 1, "rejected": 0, "casts": 0}),
        (mixture, {"matched": 1, "rejected": 1, "casts": 2}),
        (loss_less, {"matched": 0, "rejected": 0, "casts": 0}),
    ],
)
def test_counters(fn, expected):
    torch.compile(fn, backend="fusedce", options=OPTIONS)(*INPUTS)
    assert dict(counters["fusedce"]) == expected


def test_counters_add_up():
    torch.compile(fused, backend="fusedce", options=OPTIONS)(*INPUTS)
    torch.compile(mixture, backend="fusedce", options=OPTIONS)(*INPUTS)
    assert dict(counters["fusedce"]) == {"matched": 2, "rejected": 1, "casts": 2}


def test_the_lines_are_one_info_record_each(caplog):
    caplog.set_level(logging.INFO, logger="fxpass")
    torch.compile(mixture, backend="fusedce", options=OPTIONS)(*INPUTS)
    records = [r for r in caplog.records if r.name.startswith("fxpass")]
    names = ["fxpass.rewrite.transform"] * 2 + ["fxpass.casts.casts"]
    assert [(r.levelname, r.name) for r in records] == [("INFO", name) for name in names]
    kinds = [r.getMessage().split(":")[0] for r in records]
    assert kinds == ["fused", "not fused", "cast"]
    assert not any("\n" in r.getMessage() for r in records)


def test_nobody_is_told_who_did_not_ask(caplog):
    torch.compile(mixture, backend="fusedce", options=OPTIONS)(*INPUTS)
    assert not [r for r in caplog.records if r.name.startswith("fxpass")]


def test_switched_off_it_says_so_and_counts_nothing(caplog, monkeypatch):
    monkeypatch.setenv("FUSEDCE", "0")
    caplog.set_level(logging.INFO, logger="fxpass")
    torch.compile(fused, backend="fusedce", options=OPTIONS)(*INPUTS)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("fxpass")]
    assert messages == ["switched off: the graph goes to eager unchanged"]
    assert not counters["fusedce"]
