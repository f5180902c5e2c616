"""DeepSpeed: real engines of every ZeRO stage, compiled with the backend.

They train in processes of their own (``deepspeed_worker.py``), each case first in eager, which is
what the fused course is compared with, rank by rank, step by step. One test, since what costs is
to start them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpass import messages
from tests.support import tiny

MISMATCH = (
    "expected m1 and m2 to have the same dtype, but got: c10::Half != c10::BFloat16",
    "mat1 and mat2 must have the same dtype, but got Half and BFloat16",  # with a bias
)
RTOL = {**tiny.RTOL, torch.float16: 2**-11}  # what one logit is off, as for bfloat16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Runs = dict[str, dict[str, Any]]  # what deepspeed_worker.train returned, and what it compared


def test_engines(tmp_path):
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",  # a process that has seen a GPU cannot be forked
        "OMP_NUM_THREADS": "1",  # nor one with threads
    }
    if sys.platform == "linux":
        # else gloo asks for the machine's name, which a container may not know
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    program = [sys.executable, "-m", "tests.libraries.deepspeed_worker", str(tmp_path)]
    # a rank that hangs has said where it does, and ended, before this time is over
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-8000:]
    first, second = (records(tmp_path, "stages", rank) for rank in range(2))
    assert first["0"]["eager"]["losses"] != second["0"]["eager"]["losses"], "the same data"
    for rank in (first, second):
        check_stages(rank)
    check_mixed(records(tmp_path, "mixed", 0))
    check_partitioned(records(tmp_path, "partitioned", 0))


def records(folder: Path, group: str, rank: int) -> dict[str, Runs]:
    """The runs of each case."""
    return json.loads((folder / f"{group}-{rank}.json").read_text())


def check_stages(results: dict[str, Runs]) -> None:
    """Every stage and dtype is fused and trains like eager, with the logits of before the step."""
    assert [case[0] for case in results] == ["0", "1", "2", "3"]
    for case, runs in results.items():
        stage, _, precision = case.partition(" ")
        dtype = DTYPES.get(precision, torch.float32)
        fused = runs["fused"]
        assert (fused["matched"], fused["rejected"], fused["casts"]) == (1, 0, 0), case
        assert fused["head"][1] == str(dtype), case
        if stage == "3":
            assert fused["head"][0] == [0]  # it is there only while its module runs
        else:
            assert fused["returned"] == "DeferredLogits", case
            assert fused["graphs"] == 1, case
        assert_trains_like(runs, "eager", dtype, case)


def check_mixed(results: dict[str, Runs]) -> None:
    """float16 hidden states and a bfloat16 head: eager raises, the backend trains and warns."""
    assert set(results) == {"0", "1", "2", "3"}
    for case, runs in results.items():
        fused = runs["fused"]
        assert runs["eager"]["failure"] in MISMATCH, case
        # Llama's head has no bias; in stage 3 it is DeepSpeed's autograd.Function and its backward
        expected = {"1": (1, 0, 2), "3": (0, 1, 4)}.get(case, (1, 0, 3))
        assert (fused["matched"], fused["rejected"], fused["casts"]) == expected, case
        assert fused["head"][1] == "torch.bfloat16", case
        assert any(
            messages.fixed(messages.HALF_MEETS_BFLOAT16) in line for line in fused["said"]
        ), case
        assert_trains_like(runs, "by hand", torch.float16, case)
    off, error = results["2"]["off"], results["2"]["error"]
    assert off["failure"] in MISMATCH
    assert "operands of bfloat16 and float16 meet outside autocast" in error["failure"]
    assert "F.linear(hidden, self.weight, self.bias)" in error["failure"]
    assert off["losses"] == error["losses"] == []


def check_partitioned(results: dict[str, Runs]) -> None:
    """ZeRO-3 where its hooks stand between the head and the loss, and where they do not run."""
    llama = results["llama"]["fused"]
    assert (llama["matched"], llama["rejected"]) == (0, 1)
    assert "graph break" in "".join(llama["said"])
    assert llama["head"] == [[0], "torch.bfloat16"]
    assert_trains_like(results["llama"], "eager", torch.bfloat16, "llama")

    # Dynamo's own error, with any backend: it sees the partitioned weight
    direct = results["direct"]
    assert direct["eager"]["failure"] is None
    assert "size mismatch, got input (48x32), vec (0)" in direct["fused"]["failure"]

    registered = results["registered"]["fused"]
    assert registered["matched"] == 1
    assert registered["head"] == [[0], "torch.float32"]
    assert_trains_like(results["registered"], "eager", torch.float32, "registered")


def assert_trains_like(runs: Runs, oracle: str, dtype: torch.dtype, case: str) -> None:
    """To the dtype's rounding: losses, first gradients, and logits of before the last step."""
    fused, right, compared = runs["fused"], runs[oracle], dict(runs["compared"])
    assert right["failure"] is None, case
    assert fused["failure"] is None, case
    assert right["losses"][-1] < 0.95 * right["losses"][0], f"{case}: nothing was learned"
    assert fused["losses"] == pytest.approx(right["losses"], rel=RTOL[dtype]), case
    assert compared.pop("moved") > 0.2, f"{case}: the last step left the logits as they were"
    assert len(compared) > 2, case  # the logits, and gradients by name
    for name, off in compared.items():
        assert off < 10 * RTOL[dtype], f"{case}: {name}"
