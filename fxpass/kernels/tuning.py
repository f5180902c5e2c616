"""Which of a few launch configurations a generated kernel runs with, timed by Triton's autotuner.

In: a kernel, the sizes that its time depends on, the candidates, a function that launches one of
them. Out: one of the candidates; the first, the default, where nothing may be timed::

    >>> candidates = ({"BLOCK_V": 8192, "num_warps": 16}, {"BLOCK_V": 4096, "num_warps": 8})
    >>> kernel = object()  # one for the interpreter, which nothing may time
    >>> best(kernel, torch.device("cpu"), torch.bfloat16, (2048, 32000), candidates, print)
    {'BLOCK_V': 8192, 'num_warps': 16}

``triton.autotune(cache_results=True)`` times the candidates, and keeps the times in Triton's cache
directory, so that the next process times nothing. This module adds what the autotuner of Triton
3.6 and 3.7 (``triton/runtime/autotuner.py``) does not do:

- It never times while a CUDA graph is captured, in the interpreter or with deterministic
  algorithms: block sizes decide in which order a row is added up. ``Autotuner.run`` times whenever
  its key is new, and timing waits for the GPU, which ends a capture with an error.
- It rounds sizes up to powers of two. ``Autotuner.run`` has exact values in its key, and would
  time each new number of tokens.
- It tunes a function that launches a candidate on scratch memory. ``Autotuner._bench`` launches
  one kernel with the arguments of a real launch. Here a candidate also decides which kernel runs
  (of rows that fit into a block, or not), how many partial sums there are, and which block a
  tensor descriptor loads: that takes a hook of each configuration, and ``check_disk_cache`` writes
  nothing for configurations with hooks. And the kernel that overwrites logits with their gradient
  would need ``restore_value``: a second chunk of logits, copied within the time that is taken.
- It times without the 256 MiB by which ``triton.testing.do_bench`` clears the L2 cache, as much as
  the whole scratch of a fused loss may be, and takes any candidate that fails out of the choice.
  ``Autotuner._bench`` raises what is not one of three errors.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import triton

Candidate = Mapping[str, int]
Launch = Callable[[Candidate], object]

log = logging.getLogger(__name__)

_ROUNDS, _LAUNCHES = 5, 4

_chosen: dict[tuple[str | int, ...], Candidate] = {}
_one_at_a_time = threading.Lock()


def best(
    kernel: object,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    candidates: Sequence[Candidate],
    launch: Launch,
) -> Candidate:
    """The candidate with which a kernel is fastest.

    Args:
        kernel: as Triton's decorator returns it; its name differs where its text does.
        device: where it runs: the current device.
        dtype: of what it reads.
        sizes: what else its time depends on, rounded up to powers of two.
        candidates: sizes of blocks, in capitals, and options of ``triton.Config``, by name; all
            have the same names. The default comes first.
        launch: runs the kernel with one of them, any number of times. What it writes must be
            scratch, or be written again before it is read.

    Returns:
        One of the candidates; the default while a CUDA graph is captured, unless these sizes have
        been timed before.

    Raises:
        Exception: what the default's launch raises, if no candidate can be launched.
    """
    default = candidates[0]
    compiled = isinstance(kernel, triton.JITFunction)  # the interpreter has another class
    if not compiled or len(candidates) == 1 or torch.are_deterministic_algorithms_enabled():
        return default
    buckets = ((size - 1).bit_length() for size in sizes)
    key = (kernel.__name__, torch.cuda.get_device_name(device), str(dtype), *buckets)
    with _one_at_a_time:
        if key not in _chosen:
            if torch.cuda.is_current_stream_capturing():
                return default
            _chosen[key] = _fastest(kernel, key, candidates, launch)
        return _chosen[key]


class _Launch:
    """A launch as the autotuner sees a kernel: what it may tune, look up and run."""

    arg_names = ("key",)

    def __init__(self, kernel: triton.JITFunction, names: Sequence[str], launch: Launch):
        self.fn, self._names, self._launch = kernel, names, launch

    def run(self, key: tuple[str | int, ...], **options: int) -> None:
        self._launch({name: options[name] for name in self._names})


def _fastest(
    kernel: triton.JITFunction,
    key: tuple[str | int, ...],
    candidates: Sequence[Candidate],
    launch: Launch,
) -> Candidate:
    configs = [
        triton.Config(
            {name: size for name, size in candidate.items() if name.isupper()},
            **{name: option for name, option in candidate.items() if name.islower()},
        )
        for candidate in candidates
    ]
    tune = triton.autotune(configs, key=["key"], do_bench=milliseconds, cache_results=True)
    tuner = tune(_Launch(kernel, tuple(candidates[0]), launch))
    tuner.run(key=key)
    return candidates[configs.index(tuner.best_config)]


def milliseconds(launch: Callable[[], object], quantiles: object = None) -> float:
    """The median of a few rounds of launches, in ms; infinite where the launch raises.

    Args:
        launch: takes the same time whenever it is called.
        quantiles: what the autotuner asks of its clocks; only its first is looked at, the median.
    """
    try:
        launch()  # compiles it
        times = []
        for _ in range(_ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_LAUNCHES):
                launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / _LAUNCHES)
    except Exception as error:  # whatever it is: the default's own launch raises it
        log.debug("a candidate does not run: %s", error)
        return float("inf")
    return statistics.median(times)
