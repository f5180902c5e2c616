"""DeepSpeed engines that train on two ranks of gloo, in processes of their own.

``python -m tests.libraries.deepspeed_worker FOLDER`` starts two ranks, which train ``STAGES`` together; then each is
the only rank of a world of its own and trains half of what is left, for which one rank will do.
Writes ``FOLDER/GROUP-RANK.json``: case, then run, then what :func:`train` returns. Processes of
their own, since a process is one rank, and since ZeRO-3 replaces ``torch.nn.functional.linear``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from torch._dynamo.utils import counters
from torch.multiprocessing.spawn import start_processes

import fxpass.rewrite.inner  # as Inductor: once, before the ranks are forked
import fxpass.rewrite.transform  # noqa: F401
from tests.libraries.deepspeed_cases import ALONE, BATCH, DTYPES, STAGES, Case, head_of
from tests.ranks.case import said_by_fxpass
from tests.support import tiny

STEPS, LENGTH, RATE = 6, 12, 1.0
SECONDS = 360  # a rank that is not done by then says where it is, and ends; it takes 30 if alone

# What is compiled, and under which settings; None is not compiled.
RUNS: dict[str, dict[str, str] | None] = {
    "eager": None,
    "by hand": None,  # eager, with the casts that fxpass puts in
    "fused": {},
    "off": {"FUSEDCE": "0"},
    "error": {"FUSEDCE_MIXED_DTYPES": "error"},
}


def batches(rank: int) -> Iterator[Tensor]:
    """``STEPS`` times ids [B, S] that count upward, other ones on each rank."""
    random = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        start = torch.randint(tiny.WORDS, (BATCH, 1), generator=random)
        yield (start + torch.arange(LENGTH)) % tiny.WORDS + len(tiny.SPECIAL)


def train(case: Case, run: str, rank: int, seen: dict[str, Tensor]) -> dict[str, Any]:
    """Trains for ``STEPS`` steps, or to the first exception.

    Puts into ``seen``: the first step's gradients, whole and by name; ``logits``: the last step's,
    read after the weights have been changed; ``after``: what they are with those weights.

    Returns:
        ``losses``; ``failure``: the exception as text, or None; ``matched``; ``graphs``; ``said``:
        what fxpass logged; ``head``: shape and dtype of the head's weight between the steps;
        ``returned``: the type of the returned logits.
    """
    torch._dynamo.reset()
    counters.clear()
    model = case.model()
    case.prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    head = head_of(model).weight
    # a group for each dtype, as ZeRO makes one flat tensor of each group
    parts = [[p for p in trained if p.dtype == dtype] for dtype in DTYPES.values()]
    optimizer = torch.optim.SGD([{"params": part} for part in parts if part], lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, config=case.config(), optimizer=optimizer)
    case.initialized(engine)
    settings = RUNS[run]
    variables = {"FUSEDCE_INNER": case.inner, **(settings or {})}
    given = list(batches(rank))
    losses: list[float] = []
    failure, between = None, None
    returned: Any = None
    with (
        said_by_fxpass() as said,
        linear_by_hand(run == "by hand"),
        mock.patch.dict(os.environ, variables),
    ):
        try:
            if settings is not None:
                (head_of(model) if case.only_head else engine).compile(backend="fusedce")
            for ids in given:
                out = engine(input_ids=ids, labels=ids)
                loss, returned = out if isinstance(out, tuple) else (out.loss, out.logits)
                engine.backward(loss)
                if not losses:
                    seen.update(gradients(engine.module))
                engine.step()
                losses.append(loss.item())
                between = [list(head.shape), str(head.dtype)]
            seen["logits"] = returned.detach().double()
            if settings is None:
                with torch.no_grad():
                    out = engine(input_ids=given[-1], labels=given[-1])
                seen["after"] = out[1].double()
        except Exception as error:
            failure = str(error)
    engine.destroy()
    return {
        "losses": losses,
        "failure": failure,
        **{name: counters["fusedce"][name] for name in ("matched", "rejected", "casts")},
        "graphs": counters["stats"]["unique_graphs"],
        "said": said,
        "head": between,
        "returned": type(returned).__name__,
    }


@contextmanager
def linear_by_hand(on: bool) -> Iterator[None]:
    """float16 with bfloat16 is computed in float32."""
    linear = F.linear  # DeepSpeed's perhaps

    def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != weight.dtype:
            x, weight = x.float(), weight.float()
            bias = bias if bias is None else bias.float()
        return linear(x, weight, bias)

    F.linear = by_hand if on else linear
    try:
        yield
    finally:
        F.linear = linear


def gradients(model: Any) -> dict[str, Tensor]:
    """What the ranks hold together, of every parameter that is trained."""
    whole: Any = safe_get_full_grad
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: whole(p).double() for name, p in trained}


def relative(values: Tensor, right: Tensor) -> float:
    return float((values - right).abs().max() / right.abs().max())


def compare(seen: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """How far the fused logits and gradients are off, and how far the last step ``moved`` logits."""
    fused, right = seen["fused"], seen["eager" if "logits" in seen["eager"] else "by hand"]
    off = {name: relative(fused[name], right[name]) for name in fused}
    return {"moved": relative(right["after"], right["logits"]), **off}


def train_group(name: str, cases: Sequence[Case], rank: int, ranks: int, folder: Path) -> None:
    """Trains in a world of ``ranks``."""
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS),
        verbose=False,
    )
    linear = F.linear
    results: dict[str, Any] = {}
    for case in cases:
        seen: dict[str, dict[str, Tensor]] = {run: {} for run in case.runs}
        results[case.name] = {}
        for run in case.runs:
            F.linear = linear  # ZeRO-3 has replaced it
            results[case.name][run] = train(case, run, rank, seen[run])
        if "logits" in seen["fused"]:
            results[case.name]["compared"] = compare(seen)
    (folder / f"{name}-{rank}.json").write_text(json.dumps(results))
    deepspeed.comm.destroy_process_group()


def run_rank(rank: int, folder: Path) -> None:
    """What each process does."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    # It would be built by g++, which takes a minute or more, and be used in inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asks whether the CPU has instructions for float16; torch computes it on any.
    accelerator: Any = type(get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    # ZeRO-3's hooks are compiled anew for every module, until Dynamo has had enough of it
    torch._dynamo.config.recompile_limit = 1
    train_group("stages", STAGES, rank, 2, folder)
    name, cases = ALONE[rank]
    train_group(name, cases, 0, 1, folder)


if __name__ == "__main__":
    # What is imported is shared; forked after a computation, threads and locks would be, too.
    assert threading.active_count() == 1
    start_processes(run_rank, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
