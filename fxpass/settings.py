"""Every setting of fxpass, read in one place.

Precedence: ``torch.compile(..., options={"fusedce.<name>": value})``, then the environment
variable, then the default::

    >>> Settings.read({"fusedce.strategy": "chunked"}, environ={}).strategy
    'chunked'
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

PREFIX = "fusedce."


@dataclass(frozen=True)
class Settings:
    """The user's settings; ``TABLE`` has the names and allowed values of each field."""

    enabled: bool = True
    inner: str = "inductor"
    logits: str = "auto"
    mixed_dtypes: str = "cast"
    strategy: str = "auto"
    memory_mb: int = 0
    # smaller logits take no more memory than the scratch, and an operator call costs time
    min_logits_mb: float = 64.0
    dump: str = ""

    @staticmethod
    def read(
        options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> Settings:
        """The settings in force.

        Args:
            options: the ``options`` of ``torch.compile``; keys without the prefix are ignored.
            environ: the environment, ``os.environ`` by default.

        Raises:
            ValueError: an unknown name, or a value that is not allowed; the message has both.
        """
        environ = os.environ if environ is None else environ
        values = {}
        for name, row in TABLE.items():
            raw = environ.get(row.variable)
            if raw is not None and raw != "":
                values[name] = row.convert(row.variable, raw)
        known = {row.variable for row in TABLE.values()}
        for variable in environ:
            if variable.startswith("FUSEDCE_") and variable not in known:
                raise ValueError(
                    f"unknown environment variable {variable}; fxpass reads "
                    f"{', '.join(sorted(known))}"
                )
        unprefixed = []
        for key, value in (options or {}).items():
            if not key.startswith(PREFIX):
                unprefixed += [key] if key in TABLE else []
                continue
            row = TABLE.get(key.removeprefix(PREFIX))
            if row is None:
                raise ValueError(
                    f"unknown option {key!r}; fxpass has "
                    f"{', '.join(PREFIX + name for name in TABLE)}"
                )
            values[key.removeprefix(PREFIX)] = row.convert(key, value)
        settings = Settings(**values)
        # another inner backend may have an option of this name
        if unprefixed and settings.enabled and settings.inner == "inductor":
            names = " and ".join(f"{PREFIX}{name}" for name in unprefixed)
            raise ValueError(f"Inductor has no option {unprefixed[0]!r}: did you mean {names}?")
        return settings


@dataclass(frozen=True)
class Setting:
    """One row of ``TABLE``: environment variable, allowed values as text, parser, meaning."""

    variable: str
    allowed: str
    read: Callable[[Any], Any]
    meaning: str

    def convert(self, source: str, value: Any) -> Any:
        """``value`` in the type of the setting; ``source`` is the name that the user wrote."""
        try:
            return self.read(value)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{source}={value!r} is not allowed; use {self.allowed}") from error


def _one_of(*allowed: str) -> tuple[str, Callable[[Any], str]]:
    return ", ".join(allowed), {a: a for a in allowed}.__getitem__


def _toggle(value: Any) -> bool:
    return {"0": False, "1": True, False: False, True: True}[value]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 0:
        raise ValueError(value)
    return int(value)


def _size(value: Any) -> float:
    if isinstance(value, bool) or not 0 <= float(value) < float("inf"):
        raise ValueError(value)
    return float(value)


def _backend(value: Any) -> str:
    if value not in {*torch._dynamo.list_backends(exclude_tags=()), "inductor"} - {"fusedce"}:
        raise ValueError(value)
    return value


def _path(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(path)
    return path


# field of Settings, which is also the name of the option -> its Setting
TABLE: dict[str, Setting] = {
    "enabled": Setting(
        "FUSEDCE", "0 or 1", _toggle, "0 hands the untouched graph to the inner backend"
    ),
    "inner": Setting(
        "FUSEDCE_INNER",
        "inductor, aot_eager, eager or another name from torch._dynamo.list_backends(None)",
        _backend,
        "the backend that compiles the rewritten graph",
    ),
    "logits": Setting(
        "FUSEDCE_LOGITS",
        *_one_of("auto", "defer", "keep", "drop"),
        "what a graph output that holds the logits becomes; auto: defer with gradients, else keep",
    ),
    "mixed_dtypes": Setting(
        "FUSEDCE_MIXED_DTYPES",
        *_one_of("cast", "error"),
        "operands of unlike dtypes outside autocast: cast them, or raise",
    ),
    "strategy": Setting(
        "FUSEDCE_STRATEGY", *_one_of("auto", "chunked", "tiled"), "how the fused loss is computed"
    ),
    "memory_mb": Setting(
        "FUSEDCE_MEMORY_MB",
        "a whole number of MiB, 0 for the default",
        _whole,
        "scratch budget of one fused loss",
    ),
    "min_logits_mb": Setting(
        "FUSEDCE_MIN_LOGITS_MB",
        "a size in MiB, 0 to fuse all",
        _size,
        "a loss with smaller logits is left alone; unless 0, also other losses that gain nothing",
    ),
    "dump": Setting(
        "FUSEDCE_DUMP",
        "a directory",
        _path,
        "where graphs before and after and kernel sources are written",
    ),
}

assert set(TABLE) == {field.name for field in dataclasses.fields(Settings)}
