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
- It launches the default at least once in each process, because a capture cannot load a kernel.
- It rounds sizes up to powers of two. ``Autotuner.run`` uses exact values as keys, and would time
  for each new number of tokens.
- It tunes a function that launches a candidate on scratch memory. ``Autotuner._bench`` launches one
  kernel with the arguments of the real launch. Here a candidate also decides which kernel runs (one
  block per row, or several). In the autotuner this would need a hook in each configuration, and
  ``check_disk_cache`` stores nothing for configurations with hooks. The kernel that overwrites
  logits with their gradient would also need ``restore_value``, a copy of the chunk within the
  measured time.
- It spends little time on slow kernels (:class:`Timer`). ``triton.testing.do_bench`` launches each
  candidate at least six times, however long that takes.
- It stores no times if a candidate ran out of memory, which says nothing about its speed.
- It does not clear the L2 cache, for which ``triton.testing.do_bench`` allocates 256 MiB, as much
  as the whole scratch of a call. It skips every candidate that fails; ``Autotuner._bench``
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

# A quick kernel is timed in rounds of several launches. A kernel is quick if that takes at most so
# many ms; a slow one is timed one launch at a time, within the same limit. No further candidate is
# launched once all took TOTAL_MS.
ROUNDS, LAUNCHES, CANDIDATE_MS, TOTAL_MS = 5, 4, 100.0, 2000.0

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
    """A launch with the interface of a kernel that the autotuner needs.

    Attributes:
        launched: the candidates that were launched.
    """

    arg_names = ("key",)

    def __init__(self, kernel: triton.JITFunction, names: Sequence[str], launch: Launch):
        self.fn, self._names, self._launch = kernel, names, launch
        self.launched: list[Candidate] = []

    def run(self, key: tuple[str | int, ...], **options: int) -> None:
        candidate = {name: options[name] for name in self._names}
        self.launched.append(candidate)
        self._launch(candidate)


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
    timer = Timer(len(configs))
    tune = triton.autotune(configs, key=["key"], do_bench=timer, cache_results=True)
    function = _Launch(kernel, tuple(candidates[0]), launch)
    tuner = tune(function)
    try:
        tuner.run(key=key)
    except ShortOfMemoryError:
        choice = candidates[timer.times.index(min(timer.times))]
        launch(choice)  # as the autotuner does: raises if there is no memory for any candidate
        return choice
    if candidates[0] not in function.launched:
        # The times were stored. A CUDA graph may be captured with other sizes, which take the
        # default, and no kernel can be loaded then.
        try:
            launch(candidates[0])
        except Exception as error:
            log.debug("the default does not run: %s", error)
    return candidates[configs.index(tuner.best_config)]


class ShortOfMemoryError(Exception):
    """Raised after the last candidate if one ran out of memory, so that no times are stored."""


class Timer:
    """Times the candidates of one kernel, one call for each, in the order of the autotuner.

    Attributes:
        candidates: their number.
        times: of the candidates so far, in ms. Infinite if a launch raised, or if it was not
            launched because the others took too long.
    """

    def __init__(self, candidates: int):
        self.candidates, self.times = candidates, list[float]()
        self._spent, self._short_of_memory = 0.0, False

    def __call__(self, launch: Callable[[], object], quantiles: object = None) -> float:
        """The median time of a launch, in ms.

        Args:
            launch: takes the same time in every call.
            quantiles: passed by the autotuner, which reads the first quantile, the median; ignored.

        Raises:
            ShortOfMemoryError: see there.
        """
        try:
            time = self._time(launch) if self._spent <= TOTAL_MS else float("inf")
        except Exception as error:  # if the default fails too, its real launch raises the error
            log.debug("a candidate does not run: %s", error)
            self._short_of_memory |= "out of memory" in str(error)  # torch's, or the driver's
            time = float("inf")
        self.times.append(time)
        if self._short_of_memory and len(self.times) == self.candidates:
            raise ShortOfMemoryError
        return time

    def _time(self, launch: Callable[[], object]) -> float:
        launch()  # compiles it
        times = [first := self._milliseconds(launch, 1)]
        self._spent += first  # as much as the launch that compiled it
        if first * ROUNDS * LAUNCHES <= CANDIDATE_MS:
            return statistics.median(self._milliseconds(launch, LAUNCHES) for _ in range(ROUNDS))
        best = min(self.times, default=first)
        while first <= best and len(times) < ROUNDS and sum(times) + first <= CANDIDATE_MS:
            times.append(self._milliseconds(launch, 1))
        return statistics.median(times)

    def _milliseconds(self, launch: Callable[[], object], launches: int) -> float:
        """The mean time of a few launches."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(launches):
            launch()
        end.record()
        end.synchronize()
        time = start.elapsed_time(end)
        self._spent += time
        return time / launches
