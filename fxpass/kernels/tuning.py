"""Chooses the launch configuration of a generated kernel: times the candidates.

In: a kernel, the sizes that its time depends on, the candidates, a function that launches a
candidate. Out: the fastest candidate; the first, the default, when timing is not allowed::

    >>> candidates = ({"BLOCK_V": 8192, "num_warps": 16}, {"BLOCK_V": 4096, "num_warps": 8})
    >>> kernel = object()  # one for the interpreter, which nothing may time
    >>> best(kernel, torch.device("cpu"), torch.bfloat16, (2048, 32000), candidates, print)
    {'BLOCK_V': 8192, 'num_warps': 16}

The times are stored in Triton's cache directory, so the next process times nothing. Not with
``triton.autotune``: it times for every new number of tokens, also while a CUDA graph is captured,
which makes the capture fail; allocates 256 MiB to clear the L2 cache, as much as the whole scratch
of a call; and knows one kernel only, where a candidate may be another one here (one block for a
row, or several).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager

from fxpass.plan.devices import properties_of, target_of

Candidate = TypeVar("Candidate")

log = logging.getLogger(__name__)

# A kernel is timed in rounds of several launches, if they take at most so many ms; else once.
ROUNDS, LAUNCHES, LIMIT_MS = 5, 4, 100.0
NEVER = float("inf")

_chosen: dict[tuple[object, ...], int] = {}
_one_at_a_time = threading.Lock()  # autograd has a thread for each device


def best(
    kernel: object,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    candidates: Sequence[Candidate],
    launch: Callable[[Candidate], object],
) -> Candidate:
    """The fastest candidate for a kernel.

    The default, and nothing is timed, in the interpreter; with deterministic algorithms, because
    block sizes decide the order of sums; and while a CUDA graph is captured, because timing
    synchronises with the GPU, unless these sizes have been timed before.

    Args:
        kernel: the default's, a result of Triton's decorator.
        device: the current device, where the kernel runs.
        dtype: of the kernel's operands.
        sizes: other sizes that the time depends on; they are rounded up to powers of two.
        candidates: the default first; what is printed of them tells them apart.
        launch: runs a candidate, any number of times. Its outputs must be scratch memory, or be
            overwritten before they are read.

    Raises:
        Exception: the error of the default's launch, if no candidate can be launched.
    """
    compiled = isinstance(kernel, triton.JITFunction)  # the interpreter has another class
    if not compiled or len(candidates) == 1 or torch.are_deterministic_algorithms_enabled():
        return candidates[0]
    buckets = [(size - 1).bit_length() for size in sizes]
    known = kernel, device, dtype, *buckets, len(candidates)
    with _one_at_a_time:
        if known not in _chosen:
            if torch.cuda.is_current_stream_capturing():
                return candidates[0]
            gpu = properties_of(device).name, target_of(device)
            parts = triton.__version__, kernel.cache_key, gpu, dtype, buckets, candidates
            key = hashlib.sha256(repr(parts).encode()).hexdigest()
            _chosen[known] = _fastest(f"{kernel.__name__}.autotune.json", key, candidates, launch)
            if knobs.autotuning.print:
                print(f"{kernel.__name__} {gpu} {dtype} {sizes}: {candidates[_chosen[known]]}")
        return candidates[_chosen[known]]


def _fastest(
    name: str, key: str, candidates: Sequence[Candidate], launch: Callable[[Candidate], object]
) -> int:
    """The position of the fastest candidate, from stored times or from new ones."""
    cache = get_cache_manager(key)
    if (path := cache.get_file(name)) is not None:
        times = json.loads(Path(path).read_text())
        # A CUDA graph may be captured with other sizes, which take the default, and no kernel can
        # be loaded then.
        with contextlib.suppress(Exception):
            launch(candidates[0])
        return times.index(min(times))
    times, errors = list[float](), list[str]()
    for candidate in candidates:
        try:
            times.append(time_of(functools.partial(launch, candidate)))
        except Exception as error:
            log.debug("a candidate does not run: %s", error)
            times.append(NEVER)
            errors.append(str(error))
    if min(times) == NEVER:
        launch(candidates[0])  # raises the error
    # torch's error, or the driver's, which says nothing about a candidate's speed
    elif not any("out of memory" in error for error in errors):
        cache.put(json.dumps(times), name, binary=False)
    return times.index(min(times))


def time_of(launch: Callable[[], object]) -> float:
    """The median time of a launch in ms; the time of one launch if it is slow."""
    launch()  # compiles it
    first = _milliseconds(launch, 1)
    if first * ROUNDS * LAUNCHES > LIMIT_MS:
        return first
    return statistics.median(_milliseconds(launch, LAUNCHES) for _ in range(ROUNDS))


def _milliseconds(launch: Callable[[], object], launches: int) -> float:
    """The mean time of a few launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / launches
