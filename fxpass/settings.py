"""Every setting of fxpass, read in one place; the README has a table of their meanings.

Precedence: ``torch.compile(..., options={"fusedce.<name>": value})``, then the environment
variable, then the default::

    >>> Settings.read({"fusedce.strategy": "chunked"}, environ={}).strategy
    'chunked'
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import ShortenTraceback

from fxpass import messages

PREFIX = "fusedce."


class SettingError(ShortenTraceback, ValueError):
    """A setting that is not allowed. Dynamo passes a backend's ``ShortenTraceback`` on to the user,
    and wraps other exceptions in ``BackendCompilerFailed``, which is no ValueError."""

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)


class Setting(NamedTuple):
    """One setting: environment variable, allowed values as text, parser."""

    variable: str
    allowed: str
    read: Callable[[Any], Any]


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
    if value not in {*torch._dynamo.list_backends(exclude_tags=()), "inductor"} - {
        "fusedce",
        "fxpass",
    }:
        raise ValueError(value)
    return value


def _path(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(path)
    return path


@dataclass(frozen=True)
class Settings:
    """The user's settings; the name of a field is the name of the option."""

    enabled: bool = True
    inner: str = "inductor"
    logits: str = "auto"
    mixed_dtypes: str = "cast"
    strategy: str = "auto"
    memory_mb: int = 0
    accumulate: str = "auto"
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
            SettingError: an unknown name, or a value that is not allowed; the message has both.
        """
        options = options or {}
        environ = os.environ if environ is None else environ
        names = {row.variable: name for name, row in TABLE.items()}
        names |= {PREFIX + name: name for name in TABLE}
        of_fxpass = (v for v in environ if v in names or v.startswith("FUSEDCE_"))
        found = {variable: raw for variable in of_fxpass if (raw := environ.get(variable))}
        found |= {key: value for key, value in options.items() if key.startswith(PREFIX)}
        values: dict[str, Any] = {}
        for key, raw in found.items():
            if key not in names:
                kind = "option" if key in options else "environment variable"
                close = difflib.get_close_matches(key, names, 1, 0.8)
                meant = "".join(f": did you mean {name!r}?" for name in close) or ";"
                raise SettingError(
                    messages.UNKNOWN_SETTING.format(
                        kind=kind, key=key, meant=meant, names=", ".join(names)
                    )
                )
            row = TABLE[names[key]]
            try:
                values[names[key]] = row.read(raw)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise SettingError(
                    messages.SETTING_VALUE.format(key=key, value=raw, allowed=row.allowed)
                ) from error
        settings = Settings(**values)
        unprefixed = [key for key in options if key in TABLE]
        # another inner backend may have an option of this name
        if unprefixed and settings.enabled and settings.inner in _NONE_OF_OURS:
            names = " and ".join(PREFIX + key for key in unprefixed)
            raise SettingError(
                messages.NO_SUCH_OPTION.format(inner=settings.inner, key=unprefixed[0], names=names)
            )
        return settings


_NONE_OF_OURS = ("inductor", "aot_eager", "eager")  # they have no options of these names
_OF_INNER = "inductor, aot_eager, eager or another name from torch._dynamo.list_backends(None)"
# By the field of Settings: the allowed values as text, and the parser.
_ROWS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "enabled": ("0 or 1", _toggle),
    "inner": (_OF_INNER, _backend),
    "logits": _one_of("auto", "defer", "keep", "drop"),
    "mixed_dtypes": _one_of("cast", "error"),
    "strategy": _one_of("auto", "chunked", "tiled"),
    "memory_mb": ("a whole number of MiB, 0 for the default", _whole),
    "accumulate": _one_of("auto", "float32"),
    "min_logits_mb": ("a size in MiB, 0 to fuse all", _size),
    "dump": ("a directory", _path),
}
TABLE = {
    name: Setting("FUSEDCE" if name == "enabled" else f"FUSEDCE_{name.upper()}", allowed, read)
    for name, (allowed, read) in _ROWS.items()
}
assert set(TABLE) == {field.name for field in dataclasses.fields(Settings)}
