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
import tiny
import torch

MISMATCH = (
    "expected m1 and m2 to have the same dtype, but got: c10::Half != c10::BFloat16",
    "mat1 and mat2 must have the same dtype, but got Half and BFloat16",  # with a bias
)
RTOL = {**tiny.RTOL, torch.float16: 2**-11}  # what one logit is off, as for bfloat16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Records = dict[str, dict[str, Any]]  # case, then run, then what deepspeed_worker.train returned


def test_engines(tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("deepspeed_worker.py")), str(tmp_path)]
    # a process that has seen a GPU cannot be forked
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        # else gloo asks for the machine's name, which a container may not know
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    first, second = (records(tmp_path, "stages", rank) for rank in range(2))
    assert first["0"]["eager"]["losses"] != second["0"]["eager"]["losses"], "the same data"
    for rank in (first, second):
        check_stages(rank)
        check_old_zeropp(rank)
    check_mixed(records(tmp_path, "mixed", 0))
    check_partitioned(records(tmp_path, "partitioned", 0))


def records(folder: Path, group: str, rank: int) -> Records:
    return json.loads((folder / f"{group}-{rank}.json").read_text())


def check_stages(results: Records) -> None:
    """Every stage and dtype is fused and trains like eager, with the logits of before the step."""
    cases = [name for name in results if "zero++" not in name]
    assert len(cases) == 6
    for case in cases:
        stage, _, precision = case.partition(" ")
        dtype = DTYPES.get(precision, torch.float32)
        fused = results[case]["fused"]
        assert (fused["matched"], fused["rejected"], fused["casts"]) == (1, 0, 0)
        assert fused["head"][1] == str(dtype)
        if stage == "3":
            assert fused["head"][0] == [0]  # it is there only while its module runs
        else:
            assert fused["returned"] == "DeferredLogits"
            assert fused["graphs"] == 1
        assert_trains_like(fused, results[case]["eager"], dtype)


def check_mixed(results: Records) -> None:
    """float16 hidden states and a bfloat16 head: eager raises, the backend trains and warns."""
    assert set(results) == {"0", "1", "1 fp16", "2", "3"}
    for case, runs in results.items():
        fused = runs["fused"]
        assert runs["eager"]["failure"] in MISMATCH
        # Llama's head has no bias; in stage 3 it is DeepSpeed's autograd.Function and its backward
        expected = {"1": (1, 0, 2), "3": (0, 1, 4)}.get(case, (1, 0, 3))
        assert (fused["matched"], fused["rejected"], fused["casts"]) == expected
        assert fused["head"][1] == "torch.bfloat16"
        assert_warned(fused)
        assert_trains_like(fused, runs["by hand"], torch.float16)
    off, error = results["2"]["off"], results["2"]["error"]
    assert off["failure"] in MISMATCH
    assert not off["losses"]
    assert "operands of bfloat16 and float16 meet outside autocast" in error["failure"]
    assert "F.linear(hidden, self.weight, self.bias)" in error["failure"]
    assert not error["losses"]


def check_old_zeropp(results: Records) -> None:
    """Where the pair came from: it trains now, and the weights are wrong, as the warning says."""
    eager, fused = (results["zero++ before 0.19.6"][run] for run in ("eager", "fused"))
    assert eager["failure"] in MISMATCH
    assert (fused["matched"], fused["casts"]) == (1, 3)
    assert fused["failure"] is None
    assert_warned(fused)
    assert fused["losses"][0] > 2 * results["3 bf16"]["eager"]["losses"][0]


def check_partitioned(results: Records) -> None:
    """ZeRO-3 where its hooks stand between the head and the loss, and where they do not run."""
    llama = results["llama"]
    assert (llama["fused"]["matched"], llama["fused"]["rejected"]) == (0, 1)
    assert "graph break" in "".join(llama["fused"]["said"])
    assert llama["fused"]["head"] == [[0], "torch.bfloat16"]
    assert_trains_like(llama["fused"], llama["eager"], torch.bfloat16)

    # Dynamo's own error, with any backend: it sees the partitioned weight
    direct = results["direct"]
    assert direct["eager"]["failure"] is None
    assert "size mismatch, got input (48x32), vec (0)" in direct["fused"]["failure"]

    registered = results["registered"]
    assert registered["fused"]["matched"] == 1
    assert registered["fused"]["head"] == [[0], "torch.float32"]
    assert_trains_like(registered["fused"], registered["eager"], torch.float32)


def assert_trains_like(fused: dict[str, Any], oracle: dict[str, Any], dtype: torch.dtype) -> None:
    """The same losses, to the dtype's rounding, and the logits of before the last step."""
    assert oracle["failure"] is None
    assert fused["failure"] is None
    assert oracle["losses"][-1] < 0.95 * oracle["losses"][0], "nothing was learned"
    assert fused["losses"] == pytest.approx(oracle["losses"], rel=RTOL[dtype])
    assert oracle["logits_moved"] > 0.2, "the last step left the logits as they were"
    assert fused["logits_off"] < 10 * RTOL[dtype]


def assert_warned(record: dict[str, Any]) -> None:
    assert any("probably read with the wrong dtype" in line for line in record["said"])
