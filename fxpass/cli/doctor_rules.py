"""The rules of ``fxpass doctor`` about devices: facts become findings, each with what to do.

In: :class:`fxpass.cli.doctor_devices.Accelerators`, and the CPU. Out: :class:`Finding`. Every rule
is a pure function and a row of ``DEVICE_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fxpass.cli.doctor_capability import (
    arch_text,
    compared,
    has_code,
    native,
    native_cpu,
    strength,
    stronger,
)
from fxpass.cli.doctor_devices import Accelerators, Cpu, Device

# A problem makes fxpass unusable here, a warning does not; a note is how the hardware is.
LEVELS = ("problem", "warning", "note")

KERNELS_FROM = (7, 5)  # as devices.lowering_for has it
INDUCTOR_FROM = (7, 0)  # below, Inductor raises GPUTooOldForTriton


class Finding(NamedTuple):
    """One judgement: how bad (of ``LEVELS``), what is so, and what to do about it."""

    level: str
    text: str
    advice: str


def findings(accelerators: Accelerators, cpu: Cpu) -> list[Finding]:
    """What the rules find, in their order."""
    return [finding for rule in DEVICE_RULES for finding in rule(accelerators, cpu)]


# ---------------------------------------------------------------- which devices there are


def broken(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """Torch raises when it looks for devices."""
    if accelerators.error:
        yield Finding(
            "problem",
            f"torch cannot start the accelerator: {accelerators.error}",
            "mend the driver (does nvidia-smi or rocminfo work?), or set CUDA_VISIBLE_DEVICES= to "
            "use the CPU",
        )


def wrong_build(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """There are NVIDIA cards, and torch is built for something else."""
    if accelerators.cards and accelerators.build != "cuda" and not accelerators.devices:
        yield Finding(
            "warning",
            f"nvidia-smi lists {_named(accelerators.cards)}, and this torch is built without CUDA",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally/",
        )


def none_visible(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """Torch is built for accelerators and sees none, though there may be some."""
    if not accelerators.build or accelerators.devices or accelerators.error:
        return
    variable, value = accelerators.selection
    if value is not None and (accelerators.cards or _names(value)):
        why = "names no device that there is" if _names(value) else "hides every device"
        hidden = f": {_named(accelerators.cards)}" if accelerators.cards else ""
        yield Finding(
            "warning",
            f"{variable}={value} {why}{hidden}",
            f"unset {variable}, or set it to indices or UUIDs that nvidia-smi -L lists"
            if accelerators.build == "cuda"
            else f"unset {variable}, or set it to indices of devices that there are",
        )
    elif accelerators.cards or accelerators.said:
        cards = f"nvidia-smi lists {_named(accelerators.cards)}, and " if accelerators.cards else ""
        says = f": {accelerators.said[0]}" if accelerators.said else ""
        yield Finding(
            "warning",
            f"{cards}torch sees no device{says}",
            "install a torch for this driver, or a newer driver: "
            "https://pytorch.org/get-started/locally/",
        )


def partly_invalid(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """A selection of devices names more than there are."""
    variable, value = accelerators.selection
    count = len(accelerators.devices)
    names = _names(value or "")
    if 0 < count < len(names):
        yield Finding(
            "warning",
            f"{variable}={value} names {len(names)} devices, and torch sees {count}: the driver "
            f"stops at a name that it does not know, here {names[count]}",
            f"take {names[count]} out, or write a device that there is",
        )


def rank_without_device(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """A launcher has started more processes than there are devices."""
    rank, count = accelerators.local_rank, len(accelerators.devices)
    if rank is not None and 0 < count <= rank:
        yield Finding(
            "warning",
            f"LOCAL_RANK={rank}, and torch sees only {_named(accelerators.devices)}",
            f"start at most {count} of the processes here, or let {accelerators.selection[0]} "
            "show more devices",
        )


# ---------------------------------------------------------------- which one is used


def weaker_default(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """The device that is used if nothing else is said is not the one to train on."""
    used = accelerators.used
    if used is None:
        return
    others = [device for device in accelerators.devices if stronger(device, used)]
    if not others:
        return
    best = max(others, key=strength)
    rank = accelerators.local_rank
    ranked = rank is not None and rank == used.index
    role = f"the device of LOCAL_RANK={rank}" if ranked else "the default"
    better, worse = compared(best, used)
    verdict = "better at mixed precision" if worse else "stronger"
    text = f"{used.label} ({used.name}) is {role}, and {best.label} ({best.name}) is {verdict}: "
    text += ", ".join(better) + (f"; but {', '.join(worse)}" if worse else "")
    alike = [device for device in accelerators.devices if device.name == best.name]
    variables = _choosing(accelerators, alike)
    if ranked:
        advice = f"set {variables} and start {len(alike)} of the processes"
    else:
        module = best.label.partition(":")[0]
        advice = f"set {variables} before Python starts, or call torch.{module}.set_device("
        advice += f"{best.index}) first"
    yield Finding("warning", text, advice)


def hidden_stronger(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """The environment hides a card that is better than the one that is used."""
    variable, value = accelerators.selection
    cards = [accelerators.card(device) for device in accelerators.devices]
    used = accelerators.used
    card = accelerators.card(used) if used else None
    if value is None or used is None or card is None or None in cards:
        return
    hidden = [other for other in accelerators.cards if other not in cards and stronger(other, card)]
    if not hidden:
        return
    best = max(hidden, key=strength)
    yield Finding(
        "warning",
        f"{variable}={value} hides nvidia-smi's {best.index} ({best.name}), which is better than "
        f"{used.label} ({used.name}): {', '.join(compared(best, card)[0])}",
        f"if it is not meant, set CUDA_DEVICE_ORDER=PCI_BUS_ID {variable}={best.index}",
    )


def unlike_order(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """CUDA numbers unlike cards by speed, nvidia-smi by their place."""
    devices = accelerators.devices
    by_place = accelerators.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if accelerators.build != "cuda" or by_place:
        return
    if not _unlike(accelerators.cards or devices):
        return
    places, meant = _places(accelerators), _meant(accelerators)
    if not meant or places == meant:  # by UUID there is no other order
        return
    text = _mapping(accelerators, places)
    text = text or "the numbers of unlike GPUs may not be those of nvidia-smi"
    yield Finding(
        "warning",
        f"{text}: CUDA counts the fastest first unless CUDA_DEVICE_ORDER says otherwise",
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID; CUDA_VISIBLE_DEVICES then counts as nvidia-smi does",
    )


def reordered(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """The environment puts unlike devices into another order."""
    variable, value = accelerators.selection
    meant = _meant(accelerators) or _places(accelerators)
    if value is None or meant == sorted(meant) or not _unlike(accelerators.devices):
        return
    # without nvidia-smi's numbers, those that the variable has
    order = _mapping(accelerators, _places(accelerators)) or ", ".join(
        f"{device.label} is {device.name}" for device in accelerators.devices
    )
    yield Finding(
        "note",
        f"{variable}={value} changes the order: {order}",
        "use the numbers on the left in a script; without the variable they are others",
    )


# ---------------------------------------------------------------- what they can do


def no_code(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """Torch is built without code for a device."""
    for device in accelerators.devices:
        if not has_code(device, accelerators.arch_list):
            yield Finding(
                "problem" if device == accelerators.used else "warning",
                f"this torch has no code for {device.label} ({device.name}, {arch_text(device)}), "
                f"only for {', '.join(accelerators.arch_list)}",
                "install a build of torch that has: https://pytorch.org/get-started/locally/",
            )


def emulated_bf16(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """bf16 works on a device and gains nothing there."""
    lacking = [d for d in accelerators.devices if native(d)[0] == "emulated"]
    slow = [d for d in lacking if native(d)[1] in ("emulated", "native but slow")]
    half = [d for d in lacking if d not in slow]
    says = ", though torch.cuda.is_bf16_supported() is True" if accelerators.build == "cuda" else ""
    for devices, text, advice in (
        (
            half,
            f"emulated on {_labelled(half)}{says}",
            "train in fp16 there: torch.autocast(dtype=torch.float16) with torch.amp.GradScaler",
        ),
        (slow, f"emulated on {_labelled(slow)}{says}, and fp16 is slow", "stay with float32 there"),
    ):
        if devices:
            level = "warning" if accelerators.used in devices else "note"
            yield Finding(level, f"bf16 is {text}", advice)


def old(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """The Triton kernels, or all of Inductor's code for GPUs, are for newer devices."""
    for device in accelerators.devices:
        if device.capability is None or device.capability >= KERNELS_FROM:
            continue
        text = f"{device.label} ({device.name}) is {arch_text(device)}: the Triton kernels need "
        text += "sm_75, so losses run there as ATen chunks"
        advice = "nothing has to be set; on a device from sm_75 on the kernels run"
        if device.capability < INDUCTOR_FROM:
            text += ", and Inductor needs sm_70"
            advice = "set FUSEDCE_INNER=aot_eager there"
        yield Finding("warning" if device == accelerators.used else "note", text, advice)


def slow_cpu(accelerators: Accelerators, cpu: Cpu) -> Iterator[Finding]:
    """The CPU is used, and has no instructions for bf16 or for fp16."""
    words = zip(("bf16", "fp16"), native_cpu(cpu), strict=True)
    slow = " and ".join(dtype for dtype, word in words if word.startswith("emulated"))
    if accelerators.used is None and slow:
        yield Finding(
            "note",
            f"the CPU emulates matrix products of {slow}",
            "stay with float32 where time counts",
        )


DEVICE_RULES: tuple[Callable[[Accelerators, Cpu], Iterator[Finding]], ...] = (
    broken,
    wrong_build,
    none_visible,
    partly_invalid,
    rank_without_device,
    no_code,
    weaker_default,
    hidden_stronger,
    unlike_order,
    emulated_bf16,
    old,
    reordered,
    slow_cpu,
)


# ---------------------------------------------------------------- what the rules share


def _names(value: str) -> list[str]:
    """The devices that a variable names: a negative number ends the list."""
    names = []
    for name in (part.strip() for part in value.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def _places(accelerators: Accelerators) -> list[int]:
    """nvidia-smi's number of each device; empty unless all are known."""
    cards = [accelerators.card(device) for device in accelerators.devices]
    numbers = [card.index for card in cards if card is not None]
    return numbers if len(numbers) == len(cards) else []


def _meant(accelerators: Accelerators) -> list[int]:
    """The numbers that the user wrote, or all in order; empty if there are only UUIDs."""
    value = accelerators.selection[1]
    if value is None:
        return [device.index for device in accelerators.devices]
    names = _names(value)[: len(accelerators.devices)]
    return [int(name) for name in names] if all(map(str.isdecimal, names)) else []


def _choosing(accelerators: Accelerators, devices: Sequence[Device]) -> str:
    """The setting that shows these devices alone."""
    variable, value = accelerators.selection
    cards = [accelerators.card(device) for device in devices]
    if accelerators.build == "cuda" and None not in cards:
        return f"CUDA_DEVICE_ORDER=PCI_BUS_ID {variable}=" + ",".join(
            str(card.index) for card in cards if card
        )
    # torch's index counts within a selection that is in force
    names = _names(value or "")
    if len(names) != len(accelerators.devices):
        names = [str(device.index) for device in accelerators.devices]
    return f"{variable}=" + ",".join(names[device.index] for device in devices)


def _mapping(accelerators: Accelerators, places: Sequence[int]) -> str:
    pairs = zip(accelerators.devices, places, strict=False)
    return ", ".join(f"{d.label} ({d.name}) is nvidia-smi's {place}" for d, place in pairs)


def _unlike(devices: Sequence[Device]) -> bool:
    return len({device.name for device in devices}) > 1


def _labelled(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.label} ({device.name})" for device in devices)


def _named(devices: Sequence[Device]) -> str:
    """``2 devices (A100, T4)``."""
    noun = "device" if len(devices) == 1 else "devices"
    return f"{len(devices)} {noun} ({', '.join(device.name for device in devices)})"
