"""Peak memory, as the operating system or the GPU's allocator counts it.

In: a device. Out: a :class:`Memory`. Call :meth:`Memory.start` before the code to measure, then
:meth:`Memory.added`.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

_RESET = Path("/proc/self/clear_refs")


class Memory:
    """Memory in bytes: of the tensors on a GPU, or of this process.

    Attributes:
        rest: the memory in use at :meth:`start`; None where it is unknown: on a CPU without Linux,
            or on another accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rest: int | None = None

    def start(self) -> None:
        """Resets the peak, and records the memory in use now."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.rest = torch.cuda.memory_allocated(self.device)
        elif self.device.type == "cpu" and os.access(_RESET, os.W_OK):
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim is not None:
                trim(0)
            _RESET.write_text("5")  # resets the peak of resident memory
            self.rest = _status("VmRSS")

    def added(self) -> int | None:
        """The peak of the memory in use since :meth:`start`, beyond the memory in use then."""
        if self.rest is None:
            return None
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else _status("VmHWM")
        return peak - self.rest


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
