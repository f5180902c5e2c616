"""Chooses the launch configuration of a generated kernel, with Triton's autotuner.

In: a kernel, the sizes that its time depends on, the candidates, a function that launches a
candidate. Out: the fastest candidate; the first, the default, when timing is not allowed::

    >>> candidates = ({"BLOCK_V": 8192, "num_warps": 16}, {"BLOCK_V": 4096, "num_warps": 8})
    >>> kernel = object()  # one for the interpreter, which nothing may time
    >>> best(kernel, torch.device("cpu"), torch.bfloat16, (2048, 32000), candidates, print)
    {'BLOCK_V': 8192, 'num_warps': 16}

``triton.autotune(cache_results=True)`` times the candidates and stores the times in Triton's cache
directory, so the next process times nothing. This module adds to the autotuner of Triton 3.6 and
3.7 (``triton/runtime/autotuner.py``):

- It does not time while a CUDA graph is captured, in the interpreter, or with deterministic
  algorithms, because block sizes decide the order of sums. ``Autotuner.run`` times for every new
  key, and timing synchronises with the GPU, which makes a capture fail.
- It rounds sizes up to powers of two. ``Autotuner.run`` uses exact values as keys, and would time
  for each new number of tokens.
- It tunes a function that launches a candidate on scratch memory. ``Autotuner._bench`` launches one
  kernel with the arguments of the real launch. Here a candidate also decides which kernel runs (one
  block per row, or several), the number of partial sums, and the block that a tensor descriptor
  loads. In the autotuner this would need a hook in each configuration, and ``check_disk_cache``
  stores nothing for configurations with hooks. The kernel that overwrites logits with their
  gradient would also need ``restore_value``, a copy of the chunk within the measured time.
- It does not clear the L2 cache, for which ``triton.testing.do_bench`` allocates 256 MiB, as much
  as the whole scratch of a fused loss. It skips every candidate that fails; ``Autotuner._bench``
  skips only three types of errors.
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
    """The fastest candidate for a kernel.

    Args:
        kernel: the result of Triton's decorator; kernels with different text have different names.
        device: the current device, where the kernel runs.
        dtype: of the kernel's operands.
        sizes: other sizes that the time depends on; they are rounded up to powers of two.
        candidates: sizes of blocks, in capitals, and options of ``triton.Config``, by name; all
            have the same names. The default comes first.
        launch: runs the kernel with a candidate, any number of times. Its outputs must be scratch
            memory, or be overwritten before they are read.

    Returns:
        One of the candidates; while a CUDA graph is captured, the default, unless these sizes have
        been timed before.

    Raises:
        Exception: the error of the default's launch, if no candidate can be launched.
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
    """A launch with the interface of a kernel that the autotuner needs."""

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
    """The median time of a launch over a few rounds, in ms; infinite if the launch raises.

    Args:
        launch: takes the same time in every call.
        quantiles: passed by the autotuner, which reads the first quantile, the median; ignored.
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
    except Exception as error:  # if the default fails too, its real launch raises the error
        log.debug("a candidate does not run: %s", error)
        return float("inf")
    return statistics.median(times)
