"""The facts about processors that ``fxpass doctor`` judges: each accelerator, and the CPU.

In: torch and ``nvidia-smi``, which are asked here and nowhere else. Out: plain data.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

MIB = 2**20

# Variables that choose and order the devices which a process sees, by what torch is built for; of
# several that are set the first one decides.
SELECTING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
VARIABLES = (
    *dict.fromkeys(variable for variables in SELECTING.values() for variable in variables),
    "CUDA_DEVICE_ORDER",
    "LOCAL_RANK",
)

_SMI_FIELDS = ("index", "uuid", "compute_cap", "memory.total", "memory.free", "name")
_SMI_SECONDS = 30  # it hangs on some broken drivers

# Of an XPU's properties those that say how it multiplies.
_XPU_FEATURES = ("has_fp16", "has_subgroup_matrix_multiply_accumulate")

# flags of torch.cpu.get_capabilities, x86 and ARM, with what to call them
_CPU_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "sve_bf16": "SVE", "bf16": "NEON"}
_CPU_FP16 = {"amx_fp16": "AMX", "avx512_fp16": "AVX-512", "fp16_arith": "NEON"}


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        kind: ``cuda``, ``hip``, or torch's name of another accelerator.
        index: as torch counts; of one of nvidia-smi's, as nvidia-smi counts.
        memory_bytes: total; 0 if unknown.
        free_bytes: of it; None if unknown. Torch could tell, but would start a context on the
            device, which takes some of it.
        capability: of a CUDA device, for example (8, 6).
        arch: of a HIP device, for example ``gfx942``.
        processors: streaming multiprocessors or compute units; 0 if unknown.
        uuid: as nvidia-smi writes it; empty if unknown.
        features: of an XPU: the names of properties that are true.
    """

    kind: str
    index: int
    name: str
    memory_bytes: int = 0
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    arch: str = ""
    processors: int = 0
    uuid: str = ""
    features: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """As torch writes it: HIP devices are called cuda there."""
        return f"{'cuda' if self.kind == 'hip' else self.kind}:{self.index}"


@dataclass(frozen=True)
class Accelerators:
    """What torch, the driver and the environment say about accelerators.

    Attributes:
        build: what torch is built for: ``cuda``, ``hip``, ``xpu``, or empty.
        arch_list: the devices that torch has code for; empty if it does not say.
        devices: those that torch sees.
        default_index: the one that torch uses if nothing says otherwise.
        cards: all that nvidia-smi lists, whatever the environment hides.
        cards_error: why there are no ``cards``; empty if nvidia-smi answered.
        environ: of ``VARIABLES`` those that are set, empty values included.
        said: torch's own warnings while it looked for devices.
        error: what torch raised when it looked for devices; empty if it did not.
    """

    build: str = ""
    arch_list: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    default_index: int = 0
    cards: tuple[Device, ...] = ()
    cards_error: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    error: str = ""

    @property
    def local_rank(self) -> int | None:
        """This process's, from a launcher; trainers compute on the device of that index."""
        text = self.environ.get("LOCAL_RANK", "")
        return int(text) if text.isdecimal() else None

    @property
    def used(self) -> Device | None:
        """The device that a training script would compute on; None is the CPU."""
        by_index = {device.index: device for device in self.devices}
        ranked = by_index.get(self.local_rank) if self.local_rank is not None else None
        return ranked or by_index.get(self.default_index)

    @property
    def selection(self) -> tuple[str, str | None]:
        """The variable that chooses devices, and its value; None if it is not set."""
        # of other accelerators' variables nothing is known
        variables = SELECTING.get(self.build, ("VISIBLE_DEVICES",))
        chosen = next((v for v in variables if v in self.environ), variables[0])
        return chosen, self.environ.get(chosen)

    def card(self, device: Device) -> Device | None:
        """What nvidia-smi lists for one of torch's devices; None if that is unknown."""
        return next((c for c in self.cards if c.uuid == device.uuid), None)


@dataclass(frozen=True)
class Cpu:
    """The processor.

    Attributes:
        vectors: the instruction set that torch's own kernels use.
        bf16: the units that have instructions for it; empty if none has.
        fp16: likewise.
        onednn: of ``bf16`` and ``fp16`` those whose matrix products oneDNN takes here.
    """

    name: str
    vectors: str
    bf16: str
    fp16: str
    onednn: tuple[str, ...] = ()


def read_cpu() -> Cpu:
    """Asks torch about the CPU."""
    has = torch.cpu.get_capabilities()

    def units(flags: dict[str, str]) -> str:
        return ", ".join(name for flag, name in flags.items() if has.get(flag))

    name = str(has.get("cpu_name") or platform.processor() or platform.machine())
    vectors = torch.backends.cpu.get_cpu_capability()
    takes: dict[str, Callable[[], bool]] = {}
    # the operators exist only in a torch that is built with oneDNN
    if torch.backends.mkldnn.is_available():
        takes["bf16"] = torch.ops.mkldnn._is_mkldnn_bf16_supported
        takes["fp16"] = torch.ops.mkldnn._is_mkldnn_fp16_supported
    onednn = tuple(dtype for dtype, supported in takes.items() if supported())
    return Cpu(name, vectors, units(_CPU_BF16), units(_CPU_FP16), onednn)


def read_accelerators() -> Accelerators:
    """Asks nvidia-smi, then torch. Starts the accelerator's driver if there is one."""
    cards, cards_error = read_cards()
    devices: tuple[Device, ...] = ()
    default_index, error = 0, ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            devices, default_index = _read_devices()
        # a broken driver raises many types, and the report is for the people who have one
        except Exception as caught:
            error = f"{type(caught).__name__}: {_first_line(str(caught))}"
    free = {card.uuid: card.free_bytes for card in cards}
    return Accelerators(
        build=_build(),
        arch_list=tuple(torch.cuda.get_arch_list()),
        devices=tuple(replace(device, free_bytes=free.get(device.uuid)) for device in devices),
        default_index=default_index,
        cards=cards,
        cards_error=cards_error,
        environ={v: os.environ[v] for v in VARIABLES if v in os.environ},
        said=tuple(dict.fromkeys(_first_line(str(warning.message)) for warning in said)),
        error=error,
    )


def _build() -> str:
    kinds = (kind for kind in ("hip", "cuda", "xpu") if getattr(torch.version, kind, None))
    return next(kinds, "")


def _read_devices() -> tuple[tuple[Device, ...], int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (), 0
    count = torch.accelerator.device_count()
    devices = tuple(_read_device(accelerator.type, index) for index in range(count))
    return devices, torch.accelerator.current_device_index()


def _read_device(kind: str, index: int) -> Device:
    if kind == "mps":
        memory = torch.mps.recommended_max_memory()
        return Device(kind, index, torch.backends.mps.get_name(), memory)
    properties_of = getattr(torch.get_device_module(kind), "get_device_properties", None)
    properties: Any = properties_of(index) if properties_of is not None else None
    device = Device(
        kind, index, getattr(properties, "name", kind), getattr(properties, "total_memory", 0)
    )
    if kind == "xpu":
        features = tuple(f for f in _XPU_FEATURES if getattr(properties, f, False))
        return replace(device, features=features)
    if kind != "cuda" or properties is None:
        return device
    device = replace(device, processors=properties.multi_processor_count)
    if torch.version.hip:
        return replace(device, kind="hip", arch=properties.gcnArchName.partition(":")[0])
    uuid = f"GPU-{properties.uuid}"
    return replace(device, capability=(properties.major, properties.minor), uuid=uuid)


def read_cards() -> tuple[tuple[Device, ...], str]:
    """All NVIDIA cards as nvidia-smi counts them, or why they cannot be read.

    nvidia-smi asks the driver's management library: ``CUDA_VISIBLE_DEVICES`` means nothing to it,
    and no context is started on a device.
    """
    path = shutil.which("nvidia-smi")
    if path is None:
        return (), "not found"
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    command = [path, query, "--format=csv,noheader,nounits"]
    try:
        # it writes its errors to standard output
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), _first_line(str(error))
    try:
        cards = tuple(_card(line) for line in ran.stdout.splitlines() if line.strip())
    except ValueError:
        cards = ()
    if not cards:
        return (), _first_line(ran.stdout + ran.stderr) or f"exit status {ran.returncode}"
    return cards, ""


def _card(line: str) -> Device:
    """One line of nvidia-smi; a field that the card does not know is in brackets.

    Raises:
        ValueError: it is a message and not a line of the table.
    """
    index, uuid, capability, total, free, name = line.split(", ", maxsplit=5)
    major, _, minor = capability.partition(".")
    return Device(
        "cuda",
        int(index),
        name.strip(),
        int(total) * MIB if total.isdecimal() else 0,
        int(free) * MIB if free.isdecimal() else None,
        (int(major), int(minor)),
        uuid=uuid,
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
