"""The user's line behind a node."""

from __future__ import annotations

import os

import pytest
import torch
from torch.fx import Graph, Node

from fxpass.graph.source import source_line


def node(trace: str | None) -> Node:
    made = Graph().placeholder("hidden")
    made.meta["stack_trace"] = trace
    return made


def frame(file: str, line: int, code: str) -> str:
    return f'  File "{file}", line {line}, in forward\n    {code}\n'


HERE = os.path.join(os.getcwd(), "models", "gpt.py")
ELSEWHERE = os.path.join(os.path.dirname(os.getcwd()), "other", "train.py")
INSTALLED = os.path.join(os.sep, "env", "lib", "site-packages", "transformers", "loss.py")
TWICE = os.path.join(os.sep, "site-packages", "lib", "site-packages", "package", "a.py")


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        (HERE, os.path.join("models", "gpt.py")),
        (ELSEWHERE, ELSEWHERE),
        (INSTALLED, os.path.join("transformers", "loss.py")),
        (TWICE, os.path.join("package", "a.py")),
        ("train.py", "train.py"),
    ],
)
def test_the_file_is_shortened(file, shown):
    assert source_line(node(frame(file, 12, "loss = f(x)"))) == f"{shown}:12 loss = f(x)"


def test_the_innermost_frame_is_shown():
    trace = frame(ELSEWHERE, 3, "main()") + frame(HERE, 40, 'loss = F.cross_entropy(x, "mean")')
    assert source_line(node(trace)).endswith('gpt.py:40 loss = F.cross_entropy(x, "mean")')


def test_a_frame_without_code_is_shown_without_it():
    assert source_line(node('  File "train.py", line 7, in <module>')) == "train.py:7"


@pytest.mark.parametrize("trace", [None, "", "no frame in here"])
def test_a_node_without_a_trace_is_shown_by_name(trace):
    assert source_line(node(trace)) == "%hidden"


def test_a_node_whose_trace_was_never_set_is_shown_by_name():
    assert source_line(Graph().placeholder("hidden")) == "%hidden"


def test_the_line_of_a_real_graph_is_in_this_file(monkeypatch):
    monkeypatch.chdir(os.path.dirname(__file__))
    lines = []

    def backend(gm, example_inputs):
        lines.extend(source_line(n) for n in gm.graph.find_nodes(op="call_method", target="sin"))
        return gm.forward

    def f(x):
        return x.sin() + 1  # the user's own line

    torch.compile(f, backend=backend)(torch.ones(2))
    number = f.__code__.co_firstlineno + 1
    (line,) = lines
    assert line.startswith(f"test_source.py:{number} return x.sin() + 1")
