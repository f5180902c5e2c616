"""Sizes of tiles, per GPU: data, and how many splits the classes of a row are cut into.

In: a target as compilers name it and a dtype. Out: :class:`Config`, the default first; the others
are what a tuner may try::

    >>> configs_for("sm_90", torch.bfloat16)[0].BLOCK_V
    128
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """``BLOCK_N`` rows by ``BLOCK_V`` classes, added up over blocks of ``BLOCK_D``; ``GROUP_N``
    blocks of rows run beside each other; ``num_warps`` warps and ``num_stages`` buffers."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_D: int
    GROUP_N: int
    num_warps: int
    num_stages: int

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of a kernel."""
        return {k: v for k, v in self._asdict().items() if k.isupper()}

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        return {k: v for k, v in self._asdict().items() if k.islower()}


# Two 16-bit operands of a stage take 2 * BLOCK_D * (BLOCK_N + BLOCK_V) bytes of shared memory:
# 64 KiB of it have sm_75 and gfx942, 99 KiB sm_86, sm_89 and sm_120, 163 KiB sm_80, 227 KiB sm_90.
_16_BIT = {
    "sm_75": (Config(64, 64, 16, 8, 8, 2), Config(32, 64, 16, 8, 4, 2)),  # as f32, see below
    "sm_80": (Config(128, 128, 32, 8, 8, 4), Config(128, 128, 64, 8, 8, 3)),
    "sm_86": (Config(128, 128, 32, 8, 8, 3), Config(64, 128, 32, 8, 4, 4)),
    "sm_90": (Config(128, 128, 64, 16, 8, 4), Config(128, 256, 64, 16, 8, 3)),
    "sm_100": (Config(128, 64, 64, 16, 8, 4), Config(128, 128, 64, 16, 8, 4)),
    "gfx942": (Config(128, 128, 32, 8, 8, 2), Config(128, 128, 64, 8, 8, 2)),
}
# f32 products without TF32 run on the ordinary units, one operation at a time, bound by registers.
# So do 16-bit ones on sm_75, whose tensor cores Triton no longer uses.
_32_BIT = {
    "sm_75": (Config(64, 64, 16, 8, 8, 2), Config(64, 32, 32, 8, 4, 2)),
    "sm_80": (Config(64, 64, 32, 8, 8, 3), Config(128, 64, 16, 8, 8, 3)),
    "sm_86": (Config(64, 64, 32, 8, 8, 2), Config(64, 64, 16, 8, 8, 3)),
    # with three buffers, the default spills in Triton 3.6
    "sm_90": (Config(64, 64, 32, 16, 8, 2), Config(128, 64, 16, 16, 8, 3)),
    "sm_100": (Config(64, 64, 32, 16, 8, 3), Config(128, 64, 16, 16, 8, 3)),
    "gfx942": (Config(64, 64, 32, 8, 8, 2), Config(128, 64, 16, 8, 8, 2)),
}
# Triton's interpreter, where a program costs more than what is in it
_INTERPRETED = (Config(16, 32, 16, 4, 1, 1),)

# A target that has no row has the one of another that has no less of anything.
_LIKE = {"sm_87": "sm_80", "sm_103": "sm_100", "gfx950": "gfx942", "gfx90a": "gfx942"}
_SMALLEST = {"sm": "sm_86", "gfx": "gfx942"}


def configs_for(target: str, dtype: torch.dtype) -> tuple[Config, ...]:
    """The sizes worth trying on a target, ``sm_90`` or ``gfx942`` or ``cpu``; first the default."""
    if target == "cpu":
        return _INTERPRETED
    table = _32_BIT if dtype == torch.float32 else _16_BIT
    family = "gfx" if target.startswith("gfx") else "sm"
    known = target if target in table else _LIKE.get(target, _SMALLEST[family])
    return table[known]


def target_of(device: torch.device) -> str:
    """What compilers call a device."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def has_descriptors(target: str) -> bool:
    """Whether hardware reads tiles that a tensor descriptor names (TMA: Hopper and later)."""
    return target.startswith("sm_") and int(target[3:]) >= 90


def specializes_warps(target: str) -> bool:
    """Whether Triton divides loading and multiplying among warps (Blackwell's tensor memory)."""
    return target in ("sm_100", "sm_103")


# Of a row's classes, unless few rows keep a device busy: each split has partial sums of its own.
MAX_SPLITS = 16


def per_split(n: int, v: int, config: Config, processors: int) -> int:
    """How many classes one program passes over, a multiple of BLOCK_V.

    A device works off programs in waves of ``processors``. There are enough splits that a wave
    shares GROUP_N blocks of rows, and between that and 16 the number that leaves the least of the
    last wave idle. A function of sizes, so a device adds up in the same order every time.
    """
    row_blocks, class_blocks = -(-n // config.BLOCK_N), -(-v // config.BLOCK_V)
    fewest = max(1, processors // min(row_blocks, config.GROUP_N))

    def steps(blocks: int) -> int:
        """Tiles that one after the other take: waves times the tiles of a program."""
        return -(-row_blocks * -(-class_blocks // blocks) // processors) * blocks

    most = max(1, class_blocks // fewest)
    least = max(1, -(-class_blocks // max(MAX_SPLITS, fewest)))
    return min(range(most, least - 1, -1), key=steps, default=least) * config.BLOCK_V
