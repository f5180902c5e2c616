"""Describes the machine and software of a measurement: device, versions, date.

Out: :func:`about`, a plain dictionary for JSON, and :func:`heading`, its summary in one line.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fxpass
from benchmarks.loss.case import CHECKED_ROWS, SEED

PACKAGES = (
    "torch", "triton", "numpy", "transformers", "liger-kernel", "cut-cross-entropy",
    "quack-kernels", "matplotlib",
)  # fmt: skip


def about(device: str) -> dict[str, Any]:
    """Device, threads, versions (None: not installed), date in UTC, seed."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "device_name": device_name(device),
        "capability": capability(device),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "fxpass": fxpass.__version__,
        "commit": _commit(),
        "versions": {name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "seed": SEED,
        "checked_rows": CHECKED_ROWS,
    }


def heading(what: dict[str, Any]) -> str:
    """Device, versions and date in one line."""
    parts = [what["device_name"]]
    parts.append(f"{what['threads']} threads, " * (what["device"] == "cpu") + what["capability"])
    parts += [f"{k} {v}" for k, v in what["versions"].items() if v and k not in ("numpy",)]
    parts += [f"{k.upper()} {what[k]}" for k in ("cuda", "hip") if what[k]]
    fxpass_version = f"fxpass {what['fxpass']}" + f" ({what['commit']})" * bool(what["commit"])
    return "; ".join([*parts, fxpass_version, what["date"][:10]])


def device_name(device: str) -> str:
    """The model name of the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def capability(device: str) -> str:
    """The compute capability of a GPU, or the vector instructions of a CPU."""
    if torch.device(device).type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.backends.cpu.get_cpu_capability()


def version(package: str) -> str | None:
    """The version of a package; None if it is not installed. torch's version has the local part
    (+cu130), which its metadata may lack."""
    if package == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout; None without a checkout or without git."""
    here = Path(__file__).parent
    try:
        ran = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return None
    return ran.stdout.strip() or None
