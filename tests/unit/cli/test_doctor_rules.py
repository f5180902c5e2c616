"""Each rule about devices: machines on which it speaks, with what it says, and on which not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fxpass.cli import doctor_rules as rules
from fxpass.cli.doctor_devices import Accelerators, Cpu, Device
from fxpass.cli.doctor_rules import DEVICE_RULES

GIB = 2**30
CPU = Cpu("a processor", "AVX2", bf16="", fp16="")
AMX = Cpu("a processor", "AVX512", bf16="AMX", fp16="AMX", onednn=("bf16", "fp16"))

T4 = Device("cuda", 0, "T4", 15 * GIB, capability=(7, 5), processors=40, uuid="GPU-t4")
A100 = Device("cuda", 1, "A100", 40 * GIB, capability=(8, 0), processors=108, uuid="GPU-a100")
OTHER = dataclasses.replace(A100, index=2, uuid="GPU-other")
P40 = Device("cuda", 0, "P40", 24 * GIB, capability=(6, 1), processors=30, uuid="GPU-p40")
A2 = Device("cuda", 1, "A2", 15 * GIB, capability=(8, 6), processors=10, uuid="GPU-a2")
V100 = Device("cuda", 0, "V100", 32 * GIB, capability=(7, 0), processors=80, uuid="GPU-v100")
MI100 = Device("hip", 0, "MI100", 32 * GIB, arch="gfx908", processors=120)
MI300 = Device("hip", 1, "MI300X", 192 * GIB, arch="gfx942", processors=304)
W6800 = Device("hip", 0, "W6800", 32 * GIB, arch="gfx1030", processors=60)
ARC = Device("xpu", 0, "Arc", 16 * GIB, features=("has_fp16",))
CARDS = (T4, A100)  # as nvidia-smi lists them

WEBSITE = "https://pytorch.org/get-started/locally/"
TOLD = "though torch.cuda.is_bf16_supported() is True"
IN_FP16 = "train in fp16 there: torch.autocast(dtype=torch.float16) with torch.amp.GradScaler"


def at(index: int, device: Device) -> Device:
    return dataclasses.replace(device, index=index)


def cuda(*devices: Device, cards: tuple[Device, ...] = (), **more: Any) -> Accelerators:
    """What torch built for CUDA sees, devices counted in the order given."""
    environ = {k: more.pop(k) for k in list(more) if k.isupper()}
    counted = tuple(at(index, device) for index, device in enumerate(devices))
    return Accelerators("cuda", devices=counted, cards=cards, environ=environ, **more)


def hip(*devices: Device, **environ: str) -> Accelerators:
    counted = tuple(at(index, device) for index, device in enumerate(devices))
    return Accelerators("hip", devices=counted, environ=environ)


BY_PLACE = "PCI_BUS_ID"
STRONGER = "bf16 tensor cores against emulated, 108 processors against 40 processors, "
STRONGER += "40.0 GiB against 15.0 GiB"
HIDES = f"hides nvidia-smi's 1 (A100), which is better than cuda:0 (T4): {STRONGER}"
SHOW_1 = "if it is not meant, set CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"
FASTEST = "CUDA counts the fastest first unless CUDA_DEVICE_ORDER says otherwise"
MAY_DIFFER = "the numbers of unlike GPUs may not be those of nvidia-smi"
ORDER = "set CUDA_DEVICE_ORDER=PCI_BUS_ID; CUDA_VISIBLE_DEVICES then counts as nvidia-smi does"
UNSET = "unset CUDA_VISIBLE_DEVICES, or set it to indices or UUIDs that nvidia-smi -L lists"
USE_1 = "set CUDA_VISIBLE_DEVICES=1 before Python starts, or call torch.cuda.set_device(1) first"
LEFT = "use the numbers on the left in a script; without the variable they are others"

# (rule, the machine, and the one finding: how bad and what, what to do)
SPEAKS: list[tuple[Callable[..., Any], Accelerators, str, str]] = [
    (
        rules.broken,
        cuda(error="RuntimeError: CUDA unknown error"),
        "problem: torch cannot start the accelerator: RuntimeError: CUDA unknown error",
        "mend the driver (does nvidia-smi or rocminfo work?), or set CUDA_VISIBLE_DEVICES= to "
        "use the CPU",
    ),
    (
        rules.wrong_build,
        Accelerators(cards=CARDS),
        "warning: nvidia-smi lists 2 devices (T4, A100), and this torch is built without CUDA",
        f"install a CUDA build of torch: {WEBSITE}",
    ),
    (
        rules.none_visible,
        cuda(cards=CARDS, CUDA_VISIBLE_DEVICES=""),
        "warning: CUDA_VISIBLE_DEVICES= hides every device: 2 devices (T4, A100)",
        UNSET,
    ),
    (
        rules.none_visible,
        cuda(cards=(T4,), CUDA_VISIBLE_DEVICES="-1"),
        "warning: CUDA_VISIBLE_DEVICES=-1 hides every device: 1 device (T4)",
        UNSET,
    ),
    (
        rules.none_visible,
        cuda(cards=CARDS, CUDA_VISIBLE_DEVICES="2"),
        "warning: CUDA_VISIBLE_DEVICES=2 names no device that there is: 2 devices (T4, A100)",
        UNSET,
    ),
    (
        rules.none_visible,
        cuda(CUDA_VISIBLE_DEVICES="NoDevFiles"),
        "warning: CUDA_VISIBLE_DEVICES=NoDevFiles names no device that there is",
        UNSET,
    ),
    (
        rules.none_visible,
        hip(HIP_VISIBLE_DEVICES="4"),
        "warning: HIP_VISIBLE_DEVICES=4 names no device that there is",
        "unset HIP_VISIBLE_DEVICES, or set it to indices of devices that there are",
    ),
    (
        rules.none_visible,
        cuda(cards=CARDS, said=("The NVIDIA driver on your system is too old",)),
        "warning: nvidia-smi lists 2 devices (T4, A100), and torch sees no device: The NVIDIA driver on "
        "your system is too old",
        f"install a torch for this driver, or a newer driver: {WEBSITE}",
    ),
    (
        rules.partly_invalid,
        cuda(T4, cards=CARDS, CUDA_VISIBLE_DEVICES="0, 5,1"),
        "warning: CUDA_VISIBLE_DEVICES=0, 5,1 names 3 devices, and torch sees 1: the driver stops at a "
        "name that it does not know, here 5",
        "take 5 out, or write a device that there is",
    ),
    (
        rules.rank_without_device,
        cuda(A100, LOCAL_RANK="1"),
        "warning: LOCAL_RANK=1, and torch sees only 1 device (A100)",
        "start at most 1 of the processes here, or let CUDA_VISIBLE_DEVICES show more devices",
    ),
    (
        rules.weaker_default,
        cuda(T4, A100),
        f"warning: cuda:0 (T4) is the default, and cuda:1 (A100) is stronger: {STRONGER}",
        USE_1,
    ),
    (  # the index that nvidia-smi counts is certain only with the order
        rules.weaker_default,
        cuda(T4, A100, OTHER, cards=(T4, A100, OTHER)),
        f"warning: cuda:0 (T4) is the default, and cuda:1 (A100) is stronger: {STRONGER}",
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,2 before Python starts, or "
        "call torch.cuda.set_device(1) first",
    ),
    (  # the best one, at another place than the last or the first
        rules.weaker_default,
        cuda(T4, A2, A100, V100),
        f"warning: cuda:0 (T4) is the default, and cuda:2 (A100) is stronger: {STRONGER}",
        USE_1.replace("1", "2"),
    ),
    (  # the launcher's number has no device
        rules.weaker_default,
        cuda(T4, A100, LOCAL_RANK="2"),
        f"warning: cuda:0 (T4) is the default, and cuda:1 (A100) is stronger: {STRONGER}",
        USE_1,
    ),
    (  # within a selection
        rules.weaker_default,
        cuda(T4, A100, OTHER, CUDA_VISIBLE_DEVICES="3,2,0"),
        f"warning: cuda:0 (T4) is the default, and cuda:1 (A100) is stronger: {STRONGER}",
        "set CUDA_VISIBLE_DEVICES=2,0 before Python starts, or call torch.cuda.set_device(1) first",
    ),
    (  # a launcher's process
        rules.weaker_default,
        cuda(A100, T4, LOCAL_RANK="1"),
        f"warning: cuda:1 (T4) is the device of LOCAL_RANK=1, and cuda:0 (A100) is stronger: {STRONGER}",
        "set CUDA_VISIBLE_DEVICES=0 and start 1 of the processes",
    ),
    (  # what mixed precision needs counts for more than size
        rules.weaker_default,
        cuda(P40, A2),
        "warning: cuda:0 (P40) is the default, and cuda:1 (A2) is better at mixed precision: bf16 tensor "
        "cores against emulated, fp16 tensor cores against native but slow; but 10 processors "
        "against 30 processors, 15.0 GiB against 24.0 GiB",
        USE_1,
    ),
    (
        rules.weaker_default,
        hip(MI100, MI300),
        "warning: cuda:0 (MI100) is the default, and cuda:1 (MI300X) is stronger: bf16 matrix units "
        "against matrix units at half rate, 304 processors against 120 processors, 192.0 GiB "
        "against 32.0 GiB",
        "set HIP_VISIBLE_DEVICES=1 before Python starts, or call torch.cuda.set_device(1) first",
    ),
    (
        rules.hidden_stronger,
        cuda(T4, cards=CARDS, CUDA_VISIBLE_DEVICES="0"),
        f"warning: CUDA_VISIBLE_DEVICES=0 {HIDES}",
        SHOW_1,
    ),
    (
        rules.hidden_stronger,
        cuda(T4, cards=(*CARDS, at(2, A2)), CUDA_VISIBLE_DEVICES="0"),
        f"warning: CUDA_VISIBLE_DEVICES=0 {HIDES}",
        SHOW_1,
    ),
    (  # fastest first
        rules.unlike_order,
        cuda(A100, T4, cards=CARDS),
        "warning: cuda:0 (A100) is nvidia-smi's 1, cuda:1 (T4) is nvidia-smi's 0: " + FASTEST,
        ORDER,
    ),
    (  # the user meant the A100, which is 1 for nvidia-smi
        rules.unlike_order,
        cuda(T4, cards=CARDS, CUDA_VISIBLE_DEVICES="1"),
        "warning: cuda:0 (T4) is nvidia-smi's 0: " + FASTEST,
        ORDER,
    ),
    (
        rules.unlike_order,
        cuda(A100, T4, cards_error="not found"),
        f"warning: {MAY_DIFFER}: {FASTEST}",
        ORDER,
    ),
    (  # one of them is not among the cards
        rules.unlike_order,
        cuda(T4, A2, cards=CARDS),
        f"warning: {MAY_DIFFER}: {FASTEST}",
        ORDER,
    ),
    (
        rules.reordered,
        cuda(A100, T4, cards=CARDS, CUDA_VISIBLE_DEVICES="1,0", CUDA_DEVICE_ORDER=BY_PLACE),
        "note: CUDA_VISIBLE_DEVICES=1,0 changes the order: cuda:0 (A100) is nvidia-smi's 1, cuda:1 "
        "(T4) is nvidia-smi's 0",
        LEFT,
    ),
    (
        rules.reordered,
        cuda(A100, T4, cards=CARDS, CUDA_VISIBLE_DEVICES="GPU-a1,GPU-t"),
        "note: CUDA_VISIBLE_DEVICES=GPU-a1,GPU-t changes the order: cuda:0 (A100) is nvidia-smi's 1, "
        "cuda:1 (T4) is nvidia-smi's 0",
        LEFT,
    ),
    (
        rules.reordered,
        hip(MI300, MI100, HIP_VISIBLE_DEVICES="1,0"),
        "note: HIP_VISIBLE_DEVICES=1,0 changes the order: cuda:0 is MI300X, cuda:1 is MI100",
        LEFT,
    ),
    (
        rules.no_code,
        cuda(P40, A2, arch_list=("sm_75", "sm_80")),
        "problem: this torch has no code for cuda:0 (P40, sm_61), only for sm_75, sm_80",
        f"install a build of torch that has: {WEBSITE}",
    ),
    (  # not the one that is used
        rules.no_code,
        cuda(A2, P40, arch_list=("sm_75", "sm_80")),
        "warning: this torch has no code for cuda:1 (P40, sm_61), only for sm_75, sm_80",
        f"install a build of torch that has: {WEBSITE}",
    ),
    (
        rules.emulated_bf16,
        cuda(T4, A100),
        f"warning: bf16 is emulated on cuda:0 (T4), {TOLD}",
        IN_FP16,
    ),
    (
        rules.emulated_bf16,
        cuda(A100, T4),
        f"note: bf16 is emulated on cuda:1 (T4), {TOLD}",
        IN_FP16,
    ),
    (
        rules.emulated_bf16,
        cuda(A100, P40),
        f"note: bf16 is emulated on cuda:1 (P40), {TOLD}, and fp16 is slow",
        "stay with float32 there",
    ),
    (
        rules.emulated_bf16,
        hip(W6800),
        "warning: bf16 is emulated on cuda:0 (W6800)",
        IN_FP16,
    ),
    (
        rules.emulated_bf16,
        Accelerators("xpu", devices=(ARC,)),
        "warning: bf16 is emulated on xpu:0 (Arc)",
        IN_FP16,
    ),
    (
        rules.old,
        cuda(V100),
        "warning: cuda:0 (V100) is sm_70: the Triton kernels need sm_75, so losses run there as ATen chunks",
        "nothing has to be set; on a device from sm_75 on the kernels run",
    ),
    (
        rules.old,
        cuda(A100, P40),
        "note: cuda:1 (P40) is sm_61: the Triton kernels need sm_75, so losses run there as ATen "
        "chunks, and Inductor needs sm_70",
        "set FUSEDCE_INNER=aot_eager there",
    ),
    (
        rules.slow_cpu,
        Accelerators(),
        "note: the CPU emulates matrix products of bf16 and fp16",
        "stay with float32 where time counts",
    ),
]

# (rule, a machine about which it has nothing to say)
SILENT = [
    (rules.broken, cuda(A100)),
    (rules.wrong_build, Accelerators()),
    (rules.wrong_build, cuda(cards=CARDS)),
    (rules.wrong_build, Accelerators("hip", devices=(MI300,), cards=(T4,))),
    (rules.none_visible, cuda(T4, cards=CARDS, CUDA_VISIBLE_DEVICES="0")),
    (rules.none_visible, cuda()),  # there is none
    (rules.none_visible, cuda(CUDA_VISIBLE_DEVICES="")),  # nor here, as far as is known
    (rules.none_visible, Accelerators(environ={"CUDA_VISIBLE_DEVICES": "0"})),  # torch for the CPU
    (rules.none_visible, cuda(cards=CARDS, error="broken")),  # that is what counts
    (rules.partly_invalid, cuda(T4, CUDA_VISIBLE_DEVICES="0")),
    (rules.partly_invalid, cuda(T4, CUDA_VISIBLE_DEVICES="0,-1,1")),  # the end is meant
    (rules.partly_invalid, cuda(T4, A100)),
    (rules.partly_invalid, cuda(CUDA_VISIBLE_DEVICES="7")),  # none_visible
    (rules.rank_without_device, cuda(T4, A100, LOCAL_RANK="1")),
    (rules.rank_without_device, cuda(T4)),
    (rules.rank_without_device, Accelerators(environ={"LOCAL_RANK": "1"})),  # on the CPU
    (rules.weaker_default, cuda(A100, T4)),
    (rules.weaker_default, cuda(T4, A100, default_index=1)),
    (rules.weaker_default, cuda(T4, A100, LOCAL_RANK="1")),
    (rules.weaker_default, cuda(T4, T4)),
    (rules.weaker_default, cuda()),
    (rules.hidden_stronger, cuda(A100, cards=CARDS, CUDA_VISIBLE_DEVICES="1")),
    (rules.hidden_stronger, cuda(T4, cards_error="not found", CUDA_VISIBLE_DEVICES="0")),
    (rules.hidden_stronger, cuda(T4, A100, cards=CARDS, CUDA_VISIBLE_DEVICES="0,1")),
    (rules.hidden_stronger, cuda(T4, cards=CARDS)),  # a container hides it
    (rules.unlike_order, cuda(T4, A100, cards=CARDS)),  # the orders are the same
    (rules.unlike_order, cuda(A100, cards=CARDS, CUDA_VISIBLE_DEVICES="GPU-a100")),
    (rules.unlike_order, cuda(A100, T4, CUDA_DEVICE_ORDER=BY_PLACE)),
    (rules.unlike_order, cuda(T4, T4)),
    (rules.unlike_order, cuda(cards=CARDS, CUDA_VISIBLE_DEVICES="")),
    (rules.unlike_order, hip(MI300, MI100)),
    (rules.reordered, cuda(T4, A100, cards=CARDS, CUDA_VISIBLE_DEVICES="0,1")),
    (rules.reordered, cuda(A100, T4, cards=CARDS)),  # by CUDA's order: unlike_order
    (rules.reordered, cuda(T4, T4, CUDA_VISIBLE_DEVICES="1,0")),
    (rules.no_code, cuda(T4, A100, arch_list=("sm_75", "sm_80"))),
    (rules.emulated_bf16, cuda(A100)),
    (rules.emulated_bf16, hip(MI100, MI300)),
    (rules.emulated_bf16, Accelerators(devices=(Device("mps", 0, "Apple M2"),))),
    (rules.old, cuda(T4)),
    (rules.old, hip(MI100)),
    (rules.slow_cpu, cuda(A100)),
]


def name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("rule", "machine", "text", "advice"), SPEAKS, ids=name)
def test_speaks(rule: Callable[..., Any], machine: Accelerators, text: str, advice: str) -> None:
    (finding,) = rule(machine, CPU)
    assert (f"{finding.level}: {finding.text}", finding.advice) == (text, advice)


@pytest.mark.parametrize(("rule", "machine"), SILENT, ids=name)
def test_is_silent(rule: Callable[..., Any], machine: Accelerators) -> None:
    assert list(rule(machine, CPU)) == []


def test_a_cpu_with_native_units_is_not_slow() -> None:
    assert list(rules.slow_cpu(Accelerators(), AMX)) == []
    half = dataclasses.replace(AMX, fp16="")
    assert "products of fp16" in next(rules.slow_cpu(Accelerators(), half)).text


def test_every_rule_is_in_the_table_and_tested_both_ways() -> None:
    assert {rule for rule, *_ in SPEAKS} == set(DEVICE_RULES) == {rule for rule, _ in SILENT}


def test_devices_that_want_unlike_dtypes_are_told_apart() -> None:
    found = list(rules.emulated_bf16(cuda(T4, A100, P40, V100), CPU))
    assert [(finding.level, finding.text) for finding in found] == [
        ("warning", f"bf16 is emulated on cuda:0 (T4), cuda:3 (V100), {TOLD}"),
        ("note", f"bf16 is emulated on cuda:2 (P40), {TOLD}, and fp16 is slow"),
    ]


def test_findings_are_those_of_all_rules() -> None:
    found = rules.findings(cuda(V100, arch_list=("sm_75",)), CPU)
    assert [finding.level for finding in found] == ["problem", "warning", "warning"]
