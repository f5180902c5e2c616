"""The README's picture is what its command draws, and its formulas are what GPUs measured."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import memory
from benchmarks.loss.table import MIB
from fxpass.plan.plan import plan_head
from tests.support.gpus import H100, T4

ROOT = Path(__file__).parents[2]
README = (ROOT / "benchmarks" / "README.md").read_text()
LLAMA = 4096, 128256


# MiB of a step of Llama-3-8B's head on an H200 and an H100 (benchmarks/README.md)
@pytest.mark.parametrize(
    ("line", "n", "measured"),
    [
        (memory.inductor, 4096, 2036),
        (memory.inductor, 8192, 3070),
        (memory.inductor, 16384, 5138),
        (memory.eager, 8192, 12024),
        (memory.eager, 16384, 24048),
    ],
)
def test_formulas_are_what_a_gpu_measured(line, n, measured):
    assert line(n, *LLAMA) // MIB == measured


def test_the_picture_is_the_readmes(gpus):
    """Also on a machine with a GPU, whichever."""
    drawn = (ROOT / "benchmarks" / "memory.svg").read_text()
    for cards in ((), (H100,), (T4,)):
        gpus.have(*cards)
        assert memory.svg("llama-3-8b") == drawn, "python -m benchmarks.memory --svg ..."
    texts = [e.text for e in ElementTree.fromstring(drawn) if e.tag.endswith("text")]
    assert "Inductor, 9.1" in texts
    assert "fusedce, 3.2" in texts
    assert len(drawn) < 60_000


def test_the_memory_in_the_readmes_table(gpus):
    """By the plan of an H100; under autocast with the weight's copy and its gradient in f32."""
    gpus.have(H100)
    table = README.split("| N, D, V | MiB by plan |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\d+), (\d+), (\d+)(.*?) \| ([\d,]+) \|", table, re.MULTILINE)
    assert len(rows) == 5
    for *sizes, what, said in rows:
        n, d, v = map(int, sizes)
        if "f32 weight" in what:
            spec = replace(memory.LOSS, unrounded=("weight",))
            chunk = plan_head(
                n, d, v, torch.bfloat16, torch.device("cuda"), spec, False, True
            ).scratch
            counted = chunk + 2 * d * v + 4 * d * v + 2 * n * d
        else:
            counted = memory.fusedce(n, d, v)
        assert counted // MIB == int(said.replace(",", "")), sizes


def test_the_example():
    found = doctest.testmod(memory)
    assert found.attempted
    assert not found.failed


def test_the_command(tmp_path, capsys):
    file = tmp_path / "memory.svg"
    assert memory.main(["--head", "gpt-2", "--svg", str(file)]) == 0
    assert "gpt-2's head, 768 x 50257" in file.read_text()
    assert "| gpt-2, N | eager | Inductor | fusedce | gradients alone |" in capsys.readouterr().out
