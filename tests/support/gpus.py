"""GPUs that torch says it has, on a machine that need not have any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fxpass.plan import devices, plan

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """One GPU, with the names of what ``torch.cuda.get_device_properties`` returns."""

    name: str
    major: int
    minor: int
    total_memory: int = 16 * GIB
    multi_processor_count: int = 40
    gcnArchName: str = ""  # noqa: N815 - torch's name


H200 = Card("NVIDIA H200", 9, 0, 139 * GIB, 132)
H100 = Card("NVIDIA H100 80GB HBM3", 9, 0, 80 * GIB, 132)
A100 = Card("NVIDIA A100", 8, 0, 80 * GIB, 108)
T4 = Card("Tesla T4", 7, 5, 15 * GIB)
V100 = Card("Tesla V100", 7, 0, 32 * GIB, 80)
MI250 = Card("MI250X", 9, 0, 64 * GIB, 110, "gfx90a:sramecc+:xnack-")
RADEON = Card("Radeon RX 7900", 11, 0, 24 * GIB, 48, "gfx1100")
MI300 = Card("MI300X", 9, 4, 192 * GIB, 304, "gfx942:sramecc+:xnack-")


@dataclass
class Gpus:
    """Answers in torch's place what a program asks about GPUs, and takes down about which.

    Attributes:
        cards: by device index; see :meth:`have`.
        current: the index of the current device.
        capturing: the index of the device whose stream a CUDA graph records.
        asked: the index of each device that something was asked about.
    """

    patch: pytest.MonkeyPatch
    cards: tuple[Card, ...] = ()
    current: int = 0
    capturing: int | None = None
    asked: list[int] = field(default_factory=list)

    def have(self, *cards: Card, hip: str | None = None) -> None:
        """From now on, these are the GPUs, and torch is built for CUDA or, with ``hip``, ROCm."""
        self.cards = cards
        self.forget()
        answers: dict[Any, dict[str, Any]] = {
            torch.version: {"hip": hip, "cuda": None if hip else "13.0"},
            torch.cuda: {
                "is_available": lambda: bool(cards),
                "device_count": lambda: len(cards),
                "current_device": lambda: self.current,
                "device": lambda device: _Current(self, device.index or 0),
                "get_device_properties": self._card,
                "get_device_capability": lambda device=None: (
                    self._card(device).major,
                    self._card(device).minor,
                ),
                "get_device_name": lambda device=None: self._card(device).name,
                "is_current_stream_capturing": self._is_capturing,
                "Event": _Event,
            },
            torch.accelerator: {
                "current_accelerator": lambda check_available=False: (
                    torch.device("cuda") if cards else None
                ),
                "device_count": lambda: len(cards),
                "current_device_index": lambda: self.current,
            },
        }
        for module, functions in answers.items():
            for name, answer in functions.items():
                self.patch.setattr(module, name, answer)

    @staticmethod
    def forget() -> None:
        """What is kept of answers: those to a process do not change, these do."""
        for module in (devices, plan):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()

    def _card(self, device: torch.device | int | None = None) -> Card:
        index = getattr(device, "index", device)
        index = self.current if index is None else index
        self.asked.append(index)
        return self.cards[index]

    def _is_capturing(self) -> bool:
        self.asked.append(self.current)
        return self.current == self.capturing


class _Event:
    """``torch.cuda.Event``: what was queued before it is done at once."""

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


class _Current:
    """``torch.cuda.device``: another current device for a while."""

    def __init__(self, gpus: Gpus, index: int):
        self.gpus, self.index = gpus, index

    def __enter__(self) -> None:
        self.before, self.gpus.current = self.gpus.current, self.index

    def __exit__(self, *_: object) -> None:
        self.gpus.current = self.before
