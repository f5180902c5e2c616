"""Outcomes of graphs whose code comes from a cache of torch's.

In: a Dynamo graph and the pass. Out: the pass's records of the joint graphs. AOTAutograd's cache
gives a second process code that has the calls, and does not run the pass; the pass's records are
stored beside that cache, by the text of Dynamo's graph and the key of the pass::

    <cache_dir>/fxpass/<key>    the records, pickled
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import sympy
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from fxpass.formula import expression
from fxpass.graph.text import graph_text
from fxpass.rows.backend import Rewritten, RowsPass

log = logging.getLogger(__name__)


@contextmanager
def remembering(gm: GraphModule, rows: RowsPass) -> Iterator[None]:
    """A context in which a graph is compiled. After it, ``rows.made`` has the records of the
    compiled code, also of a cache's code; it is empty where there is no record."""
    key = sha256((graph_text(gm) + rows.key()).encode()).hexdigest()
    place = Path(cache_dir(), "fxpass", key)
    yield
    try:
        if rows.made:
            _write(place, [replace(joint, regions=None, graph=None) for joint in rows.made])
        elif place.exists():
            rows.made += pickle.loads(place.read_bytes())
    except Exception:  # a report is not worth a program
        log.debug("%s", place, exc_info=True)


class _Pickler(pickle.Pickler):
    """Writes the expressions of a formula as text: their classes have no names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, sympy.Basic):
            return expression.parse, (expression.text(obj),)  # type: ignore[arg-type]
        return NotImplemented


def _write(place: Path, made: list[Rewritten]) -> None:
    """Writes a file that other processes see whole, or not at all."""
    content = io.BytesIO()
    _Pickler(content).dump(made)
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content.getvalue())
    os.replace(name, place)
