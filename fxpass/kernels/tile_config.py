"""Sizes of tiles for each GPU, and the number of splits of a row's classes.

In: a GPU, as compilers name it, a dtype and a spec. Out: :class:`Config`, the default first, then
other candidates for the tuner, those that spill no registers::

    >>> plain, smoothed = Spec(), Spec(label_smoothing=0.1)
    >>> [config.BLOCK_V for config in configs_for("sm_90", torch.bfloat16, plain)]
    [128, 256]
    >>> [config.BLOCK_V for config in configs_for("sm_90", torch.bfloat16, smoothed)]
    [128]
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxpass.spec.expression import Z
from fxpass.spec.spec import Spec


class Config(NamedTuple):
    """Tiles of ``BLOCK_N`` rows by ``BLOCK_V`` classes, accumulated over blocks of ``BLOCK_D``;
    ``GROUP_N`` blocks of rows run at the same time; ``num_warps`` warps, ``num_stages`` buffers."""

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


# The two 16-bit operands of a stage take 2 * BLOCK_D * (BLOCK_N + BLOCK_V) bytes of shared memory.
# sm_75 and gfx942 have 64 KiB, sm_86, sm_89 and sm_120 99 KiB, sm_80 163 KiB, sm_90 227 KiB.
_16_BIT = {
    "sm_75": (Config(64, 64, 16, 8, 8, 2), Config(32, 64, 16, 8, 4, 2)),  # as f32, see below
    "sm_80": (Config(128, 128, 32, 8, 8, 4), Config(128, 128, 64, 8, 8, 3)),
    "sm_86": (Config(128, 128, 32, 8, 8, 3), Config(64, 128, 32, 8, 4, 4)),
    "sm_90": (Config(128, 128, 64, 16, 8, 4), Config(128, 256, 64, 16, 8, 3)),
    "sm_100": (Config(128, 64, 64, 16, 8, 4), Config(128, 128, 64, 16, 8, 4)),
    "gfx942": (Config(128, 128, 32, 8, 8, 2), Config(128, 128, 64, 8, 8, 2)),
}
# f32 products without TF32 do not use tensor cores, and registers limit their tiles. 16-bit
# products on sm_75 are the same: Triton no longer uses its tensor cores.
_32_BIT = {
    "sm_75": (Config(64, 64, 16, 8, 8, 2), Config(64, 32, 32, 8, 4, 2)),
    "sm_80": (Config(64, 64, 32, 8, 8, 3), Config(128, 64, 16, 8, 8, 3)),
    "sm_86": (Config(64, 64, 32, 8, 8, 2), Config(64, 64, 16, 8, 8, 3)),
    # the default spills registers with three buffers in Triton 3.6
    "sm_90": (Config(64, 64, 32, 16, 8, 2), Config(128, 64, 16, 16, 8, 3)),
    "sm_100": (Config(64, 64, 32, 16, 8, 3), Config(128, 64, 16, 16, 8, 3)),
    "gfx942": (Config(64, 64, 32, 8, 8, 2), Config(128, 64, 16, 8, 8, 2)),
}
# Triton's interpreter, where starting a program dominates the time
_INTERPRETED = (Config(16, 32, 16, 4, 1, 1),)

# The logits that a thread may hold beside other values for each logit, such as those of a transform
# or of label smoothing. Half as many beside a target distribution, or where separate warps load and
# leave 168 registers to a thread; a quarter with f32 operands and on AMD's GPUs. A thread without
# other values may hold more.
_ELEMENTS = 64

# A GPU without a row uses the row of a GPU with no more registers or shared memory.
_LIKE = {"sm_87": "sm_80", "sm_103": "sm_100", "gfx950": "gfx942", "gfx90a": "gfx942"}
_SMALLEST = {"sm": "sm_86", "gfx": "gfx942"}


def configs_for(target: str, dtype: torch.dtype, spec: Spec) -> tuple[Config, ...]:
    """The candidates for a target (``sm_90``, ``gfx942``, ``cpu``), the default first."""
    if target == "cpu":
        return _INTERPRETED
    table = _32_BIT if dtype == torch.float32 else _16_BIT
    family = "gfx" if target.startswith("gfx") else "sm"
    known = target if target in table else _LIKE.get(target, _SMALLEST[family])
    configs = table[known]
    if spec.transform == Z and spec.target != "probabilities" and not spec.label_smoothing:
        return configs
    half = specializes_warps(target) or spec.target == "probabilities"
    quarter = family == "gfx" or dtype == torch.float32
    most = _ELEMENTS // (4 if quarter else 2 if half else 1)
    lanes = 64 if family == "gfx" else 32

    def fits(config: Config) -> bool:
        return most * lanes * config.num_warps >= config.BLOCK_N * config.BLOCK_V

    narrow = configs[0]._replace(BLOCK_V=configs[0].BLOCK_V // 2)
    return tuple(filter(fits, configs)) or (narrow,)


def has_descriptors(target: str) -> bool:
    """Whether the GPU loads tiles through tensor descriptors (TMA: Hopper and later)."""
    return target.startswith("sm_") and int(target[3:]) >= 90


def specializes_warps(target: str) -> bool:
    """Whether Triton uses separate warps to load and to multiply (Blackwell's tensor memory)."""
    return target in ("sm_100", "sm_103")


# The maximum of splits per row, unless few rows need more splits to fill a GPU. Each split writes
# its partial sums.
MAX_SPLITS = 16


def most_splits(processors: int) -> int:
    """A power of two that :func:`per_split` never exceeds, for any number of rows or classes."""
    return 1 << (max(MAX_SPLITS, processors) - 1).bit_length()


def per_split(n: int, v: int, config: Config, processors: int) -> int:
    """The number of classes of one program (one split), a multiple of BLOCK_V.

    A GPU runs programs in waves of ``processors``. There are enough splits that the programs of a
    wave share GROUP_N blocks of rows; from this number up to 16, the number of splits that leaves
    the fewest processors idle in the last wave is chosen. It depends on sizes only, so the order of
    the sums is fixed.
    """
    row_blocks, class_blocks = -(-n // config.BLOCK_N), -(-v // config.BLOCK_V)
    fewest = max(1, processors // min(row_blocks, config.GROUP_N))

    def steps(blocks: int) -> int:
        """The tiles that run one after another: waves times the tiles of a program."""
        return -(-row_blocks * -(-class_blocks // blocks) // processors) * blocks

    most = max(1, class_blocks // fewest)
    least = max(1, -(-class_blocks // max(MAX_SPLITS, fewest)))
    return min(range(most, least - 1, -1), key=steps, default=least) * config.BLOCK_V
