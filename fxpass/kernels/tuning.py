"""Which of a few launch configurations a generated kernel runs with, timed once per machine.

In: a kernel, what the choice depends on, the candidates, a function that launches one of them. Out:
one of the candidates; the first, the default, wherever none can or need be timed::

    >>> candidates = ({"BLOCK_V": 8192, "num_warps": 16}, {"BLOCK_V": 4096, "num_warps": 8})
    >>> best("linear_cross_entropy_0f", x.device, x.dtype, (rows, v), candidates, launch)
    {'BLOCK_V': 4096, 'num_warps': 8}

The choice is kept in memory and as a small JSON file beside Inductor's compiled code, so that the
next process times nothing; whichever process writes its file first decides for the others. A file
is only ever an index into the candidates: one that is damaged, or that speaks of something else, is
made again. Block sizes decide in which order a row is added up, so with
``torch.use_deterministic_algorithms`` the default is taken whatever the clock says.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

Candidate = Mapping[str, int]
Launch = Callable[[Candidate], object]
# milliseconds that a function keeps the device busy
Clock = Callable[[Callable[[], object]], float]

log = logging.getLogger(__name__)

# What another candidate's time must be of the default's; less is noise, and not worth a change.
_WORTH_A_CHANGE = 0.97
_ROUNDS, _LAUNCHES = 5, 4

_Kernel = tuple[str, torch.device, torch.dtype, tuple[tuple, ...]]
_chosen: dict[tuple[_Kernel, tuple[int, ...]], Candidate] = {}
_latest: dict[_Kernel, Candidate] = {}
_one_at_a_time = threading.Lock()


def best(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    candidates: Sequence[Candidate],
    launch: Launch,
    clock: Clock | None = None,
) -> Candidate:
    """The candidate with which a kernel is fastest.

    Args:
        kernel: its name, which differs where its text does.
        device: where it runs; the current device, if that is a GPU.
        dtype: of what it reads.
        sizes: what else its time depends on. Their powers of two count, from above.
        candidates: options by name, the default first.
        launch: runs the kernel with one of them, any number of times. What it writes must be
            scratch, or be written again before it is read. Not called while a CUDA graph is being
            recorded: then what was chosen last for this kernel holds, whatever the sizes, since
            that one has been compiled and loaded.
        clock: times a launch; by default a GPU's events, and no clock on other devices.

    Returns:
        One of the candidates. Nothing is raised: a candidate that fails is not taken, and the
        default is returned where all of them fail.
    """
    default = candidates[0]
    if len(candidates) == 1 or torch.are_deterministic_algorithms_enabled():
        return default
    buckets = tuple((size - 1).bit_length() if size > 0 else 0 for size in sizes)
    options = tuple(tuple(candidate.items()) for candidate in candidates)
    same = kernel, device, dtype, options
    key = same, buckets
    if key not in _chosen:
        clock = clock or _clock_of(device)
        if clock is None:
            return default
        if _capturing(device):  # launches would be recorded, and nothing may be compiled or loaded
            return _latest.get(same, default)
        with _one_at_a_time:
            if key not in _chosen:
                facts = {
                    "kernel": kernel,
                    **_facts(device),
                    "dtype": str(dtype).removeprefix("torch."),
                    "sizes": [1 << bucket for bucket in buckets],
                    "candidates": [dict(candidate) for candidate in candidates],
                }
                choice = _read(facts)
                if choice is None:
                    choice = _fastest(facts, candidates, launch, clock)
                if choice is None:
                    return default
                _chosen[key] = candidates[choice]
    _latest[same] = _chosen[key]
    return _chosen[key]


def directory() -> Path:
    """Where the choices are kept; whoever deletes it has them made again."""
    return Path(cache_dir()) / "fxpass_tuning"


# ---------------------------------------------------------------- the device


@functools.cache
def _facts(device: torch.device) -> dict[str, object]:
    """What makes two devices the same for a kernel, and who compiles it."""
    facts: dict[str, object] = {"triton": importlib.metadata.version("triton")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"sm_{properties.major}{properties.minor}"
        arch = properties.gcnArchName if torch.version.hip else capability
        return {**facts, "device": properties.name, "arch": arch}
    return {**facts, "device": device.type}


def _clock_of(device: torch.device) -> Clock | None:
    return _gpu_clock if device.type == "cuda" else None


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _gpu_clock(launch: Callable[[], object]) -> float:
    """The median of a few rounds; no buffer is cleared between them, which would cost memory."""
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
    return statistics.median(times)


# ---------------------------------------------------------------- the choice


def _fastest(
    facts: Mapping[str, object], candidates: Sequence[Candidate], launch: Launch, clock: Clock
) -> int | None:
    """The place of the fastest candidate, written down; None where none can be launched."""
    times: dict[int, float] = {}
    for place, candidate in enumerate(candidates):
        try:
            times[place] = clock(functools.partial(launch, candidate))
        except Exception as error:  # whatever it is: the default's own launch raises it
            log.debug("%s does not run with %s: %s", facts["kernel"], dict(candidate), error)
    if not times:
        return None
    choice = min(times, key=lambda place: times[place])
    if 0 in times and times[choice] > _WORTH_A_CHANGE * times[0]:
        choice = 0
    log.info(
        "%s runs with %s on %s: %.3f ms, of %d candidates",
        *(facts["kernel"], dict(candidates[choice]), facts["device"], times[choice], len(times)),
    )
    return _write(facts, choice, times)


def _path(facts: Mapping[str, object]) -> Path:
    text = json.dumps(facts, sort_keys=True)
    return directory() / f"{facts['kernel']}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(facts: Mapping[str, object]) -> int | None:
    """What was chosen before; None if nothing was, or what is there cannot be used."""
    path = _path(facts)
    try:
        written = json.loads(path.read_text())
        choice = written.pop("choice")
        written.pop("milliseconds")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.debug("%s is not a choice: %s", path, error)
        return None
    # a bool is an int too
    if written != facts or type(choice) is not int or not 0 <= choice < len(_candidates(facts)):
        log.debug("%s is not the choice for %s", path, facts)
        return None
    return choice


def _candidates(facts: Mapping[str, object]) -> Sequence[object]:
    candidates = facts["candidates"]
    assert isinstance(candidates, list)
    return candidates


def _write(facts: Mapping[str, object], choice: int, times: Mapping[int, float]) -> int:
    """Writes a choice unless another process was first; what counts from now on."""
    path = _path(facts)
    milliseconds = [times.get(place) for place in range(len(_candidates(facts)))]
    text = json.dumps({**facts, "choice": choice, "milliseconds": milliseconds}, indent=1)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # for its owner only
        try:
            with open(handle, "w") as file:
                file.write(text + "\n")
            try:
                os.link(draft, path)  # appears whole, and only if it is the first
            except OSError:  # there is one, or the file system has no links
                other = _read(facts)
                if other is not None:
                    return other
                os.replace(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as error:
        log.debug("the choice of %s stays in memory: %s", facts["kernel"], error)
    return choice
