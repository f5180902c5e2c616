"""DeepSpeed engines that train on ranks of gloo, in processes of their own.

``python deepspeed_worker.py FOLDER`` trains all ``GROUPS`` and writes a file for each rank of each,
``FOLDER/GROUP-RANK.json``: case, then run, then what :func:`train` returns. Processes of their own,
since a process is one rank, and since ZeRO-3 replaces ``torch.nn.functional.linear`` for good.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import tiny
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed_cases import BATCH, DTYPES, GROUPS, Case, head_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.multiprocessing.spawn import start_processes

STEPS, LENGTH, RATE = 6, 12, 1.0

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


def train(case: Case, run: str, rank: int, logits: dict[str, Tensor]) -> dict[str, Any]:
    """Trains for ``STEPS`` steps, or to the first exception.

    The last step's logits are read after the weights have been changed, and put into ``logits``.

    Returns:
        ``losses``; ``failure``: the exception as text, or None; ``matched``; ``graphs``; ``said``:
        what fxpass logged; ``head``: shape and dtype of the head's weight between the steps;
        ``returned``: the type of the returned logits. Of the runs of a case, ``logits_off`` says how
        far the fused ones are off, and ``logits_moved`` how far the last step moved the right ones.
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
    with said_by_fxpass() as said, linear_by_hand(run == "by hand"), environment(variables):
        try:
            if settings is not None:
                (head_of(model) if case.only_head else engine).compile(backend="fusedce")
            for ids in given:
                out = engine(input_ids=ids, labels=ids)
                loss, returned = out if isinstance(out, tuple) else (out.loss, out.logits)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                between = [list(head.shape), str(head.dtype)]
            logits[run] = returned.detach().double()
            if settings is None:
                with torch.no_grad():
                    out = engine(input_ids=given[-1], labels=given[-1])
                logits["after"] = out[1].double()
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
def said_by_fxpass() -> Iterator[list[str]]:
    """The messages of fxpass's loggers."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fxpass")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


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


@contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def relative(logits: Tensor, right: Tensor) -> float:
    return float((logits - right).abs().max() / right.abs().max())


def rank_of_group(rank: int, group: str, folder: str) -> None:
    """What each process does."""
    os.environ["LOCAL_RANK"] = str(rank)
    ranks, cases = GROUPS[group]
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/{group}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
        verbose=False,
    )
    linear = F.linear
    results: dict[str, Any] = {}
    for case in cases:
        logits: dict[str, Tensor] = {}
        runs = results[case.name] = {}
        for run in case.runs:
            F.linear = linear  # ZeRO-3 has replaced it
            with case.around():
                runs[run] = train(case, run, rank, logits)
        oracle = "eager" if "eager" in logits else "by hand"
        if oracle in logits and "fused" in logits:
            runs["fused"]["logits_off"] = relative(logits["fused"], logits[oracle])
            runs[oracle]["logits_moved"] = relative(logits["after"], logits[oracle])
    Path(folder, f"{group}-{rank}.json").write_text(json.dumps(results))


def prepare_process() -> None:
    """What the ranks inherit: settings, and whatever a first compilation takes seconds to import."""
    torch.set_num_threads(1)
    # It would be built by g++, which takes a minute or more, and be used in inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asks whether the CPU has instructions for float16; torch computes it on any.
    accelerator: Any = type(get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    # ZeRO-3's hooks are compiled anew for every module, until Dynamo has had enough of it
    torch._dynamo.config.recompile_limit = 1
    options: Any = {"fusedce.inner": "aot_eager"}
    ids = next(batches(0))
    llama = torch.compile(tiny.llama(), backend="fusedce", options=options)
    llama(input_ids=ids, labels=ids).loss.backward()


if __name__ == "__main__":
    prepare_process()
    for name, (count, _) in GROUPS.items():
        start_processes(rank_of_group, (name, sys.argv[1]), nprocs=count, start_method="fork")
