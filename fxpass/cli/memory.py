"""Peak memory, as the operating system or the GPU's allocator counts it.

In: a device. Out: a :class:`Memory`. Call :meth:`Memory.start` before the code to measure, then
:meth:`Memory.peak` or :meth:`Memory.added`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch


class Memory:
    """Peak memory of this process from :meth:`start` on, in bytes; unknown on this platform."""

    rest: int | None = None

    def start(self) -> None:
        """Resets the peak, and records the memory in use now."""

    def peak(self) -> int | None:
        """Largest memory in use since :meth:`start`."""
        return None

    def added(self) -> int | None:
        """The peak beyond the memory in use at :meth:`start`."""
        peak = self.peak()
        return None if peak is None or self.rest is None else peak - self.rest


class ProcMemory(Memory):
    """Resident memory as Linux counts it."""

    def start(self) -> None:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        self.rest = self._status("VmRSS")

    def peak(self) -> int | None:
        return self._status("VmHWM")

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/self/status has no {field}")


class ProcessMemory(Memory):
    """The peak over the life of the process, compilation included; POSIX has nothing better."""

    def peak(self) -> int | None:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CudaMemory(Memory):
    """Memory of the tensors on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.rest = torch.cuda.memory_allocated(self.device)

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)


def memory_of(device: torch.device) -> Memory:
    """The best measure that this machine has for ``device``."""
    if device.type == "cuda":
        return CudaMemory(device)
    if device.type != "cpu" or sys.platform == "win32":
        return Memory()
    return ProcMemory() if os.access("/proc/self/clear_refs", os.W_OK) else ProcessMemory()
