"""What a capability means: how matrices of bf16 and fp16 are multiplied, which device is stronger,
and whether torch has code for it.

In: a :class:`fxpass.cli.doctor_devices.Device` or ``Cpu``. Out: words, an order, an answer. The
words are about the hardware; ``torch.cuda.is_bf16_supported()`` is True for emulation, too.

    >>> native(Device("cuda", 0, "Tesla T4", capability=(7, 5)))
    ('emulated', 'tensor cores')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fxpass.cli.doctor_devices import Cpu, Device

# Words for how a dtype is multiplied, from the worst to the best.
RANKS = (
    "emulated",
    "unknown",
    "native but slow",
    "native",
    "matrix units at half rate",
    "matrix units",
    "tensor cores",
)

# (from this capability on, bf16, fp16), the newest first
_CUDA = (
    ((8, 0), "tensor cores", "tensor cores"),
    ((7, 0), "emulated", "tensor cores"),
    ((6, 2), "emulated", "native"),
    ((6, 1), "emulated", "native but slow"),  # 1/64 of the float32 rate
    ((5, 3), "emulated", "native"),  # twice the float32 rate, also on sm_60
    ((0, 0), "emulated", "emulated"),
)

# The chips TU116 and TU117 are sm_75 without tensor cores; only their names tell.
_TURING_WITHOUT = re.compile(
    r"\bGTX 16\d0|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)

# (what the name of the architecture begins with, bf16, fp16); the first that fits counts
_HIP = (
    ("gfx908", "matrix units at half rate", "matrix units"),
    ("gfx90a", "matrix units", "matrix units"),
    ("gfx94", "matrix units", "matrix units"),
    ("gfx95", "matrix units", "matrix units"),
    ("gfx11", "matrix units", "matrix units"),
    ("gfx12", "matrix units", "matrix units"),
    ("gfx10", "emulated", "native"),
    ("gfx9", "emulated", "native"),
    ("", "emulated", "emulated"),
)

# Boards with one chip for processor and GPU; code for their neighbours does not run on them.
_EMBEDDED = ((5, 3), (6, 2), (7, 2), (8, 7))


def native(device: Device) -> tuple[str, str]:
    """How an accelerator multiplies matrices of bf16 and of fp16, both of ``RANKS``."""
    if device.kind == "cuda" and device.capability is not None:
        if device.capability == (7, 5) and _TURING_WITHOUT.search(device.name):
            return "emulated", "native"
        return next((b, f) for since, b, f in _CUDA if device.capability >= since)
    if device.kind == "hip":
        return next((b, f) for prefix, b, f in _HIP if device.arch.startswith(prefix))
    if device.kind == "xpu":
        if "has_subgroup_matrix_multiply_accumulate" in device.features:
            return "matrix units", "matrix units"
        return "emulated", "native" if "has_fp16" in device.features else "emulated"
    if device.kind == "mps":  # Metal's half is native everywhere; torch does not tell bf16
        return "unknown", "native"
    return "unknown", "unknown"


def native_cpu(cpu: Cpu) -> tuple[str, str]:
    """How the CPU multiplies matrices of bf16 and of fp16."""
    # torch has kernels of its own for fp16 on ARM, all else is oneDNN's
    own = cpu.fp16 == "NEON"
    return _cpu_words(cpu.bf16, "bf16" in cpu.onednn), _cpu_words(
        cpu.fp16, own or "fp16" in cpu.onednn
    )


def _cpu_words(units: str, taken: bool) -> str:
    if not units:
        return "emulated"
    return f"native ({units})" if taken else f"emulated ({units} is not used by this torch)"


def stronger(left: Device, right: Device) -> bool:
    """Whether to train on ``left`` rather than on ``right``.

    What is native comes first: ``left`` has to be better in one dtype and not worse in the other.
    Between two that are alike in that, it has to be larger in something and smaller in nothing.
    """
    # two of one name are alike, though one may have less memory left, for ECC or a display
    if left.kind != right.kind or left.name == right.name:
        return False
    ranks = list(zip(_ranks(left), _ranks(right), strict=True))
    sizes = [(a, b) for a, b, _ in _sizes(left, right)]
    pairs = ranks if _ranks(left) != _ranks(right) else sizes
    return any(a > b for a, b in pairs) and all(a >= b for a, b in pairs)


def strength(device: Device) -> tuple[int, ...]:
    """A key to sort by: what is native, then sizes."""
    return (*_ranks(device), device.processors, device.memory_bytes)


def compared(left: Device, right: Device) -> tuple[list[str], list[str]]:
    """In what ``left`` is better than ``right``, and in what it is worse, in words."""
    better, worse = [], []
    for dtype, a, b in zip(("bf16", "fp16"), native(left), native(right), strict=True):
        if a != b:
            into = better if RANKS.index(a) > RANKS.index(b) else worse
            into.append(f"{dtype} {a} against {b}")
    for a, b, text in _sizes(left, right):
        if a != b:
            (better if a > b else worse).append(f"{text(a)} against {text(b)}")
    return better, worse


def memory_text(amount: int) -> str:
    """Bytes for people."""
    return f"{amount / 2**30:.1f} GiB"


def arch_text(device: Device) -> str:
    """``sm_75`` or ``gfx942``; empty if unknown."""
    return "sm_{}{}".format(*device.capability) if device.capability else device.arch


def has_code(device: Device, arch_list: Sequence[str]) -> bool:
    """Whether a torch that is built for ``arch_list`` runs on a device; True if that is unknown.

    Machine code (``sm_80``) runs on later devices of the same major number, the text form
    (``compute_80``) on all later ones; one that ends in ``a`` on that device alone, in ``f`` on its
    family (https://docs.nvidia.com/cuda/cuda-programming-guide, "Compute capabilities").
    """
    if device.kind == "hip" and device.arch:
        generic = any(arch.endswith("-generic") for arch in arch_list)
        return not arch_list or generic or device.arch in arch_list
    if device.capability is None:
        return True
    parsed = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch) for arch in arch_list]
    if not parsed or None in parsed:
        return True
    return any(match and _runs(match, device.capability) for match in parsed)


def _runs(match: re.Match[str], capability: tuple[int, int]) -> bool:
    form, major, minor, suffix = match.groups()
    built = (int(major), int(minor))
    if suffix == "a" or (form == "sm" and capability in _EMBEDDED):
        return built == capability
    if form == "compute" and not suffix:
        return built <= capability
    return built[0] == capability[0] and built <= capability


def _ranks(device: Device) -> tuple[int, ...]:
    return tuple(map(RANKS.index, native(device)))


def _sizes(left: Device, right: Device) -> list[tuple[int, int, Callable[[int], str]]]:
    """Processors and bytes of both, where both are known, and how to write them."""
    rows = (
        (left.processors, right.processors, "{} processors".format),
        (left.memory_bytes, right.memory_bytes, memory_text),
    )
    return [row for row in rows if row[0] and row[1]]
