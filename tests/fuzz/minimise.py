"""Reduces a failing case to the statements that matter.

In: a case that fails and how. Out: a smaller one that fails in the same way: without the
statements, contexts, outputs, options and inputs that it fails without as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from .case import Case, Statement

PLAIN = {
    "fusedce.strategy": "auto",
    "fusedce.memory_mb": 0,
    "fusedce.accumulate": "auto",
    "fusedce.inner": "eager",
}


def minimise(case: Case, judge: Callable[[Case], str], passes: int = 3) -> Case:
    """The smallest case that was found; ``judge`` gives the kind of failure of a case."""
    wanted = judge(case)
    for _ in range(passes):
        before = case
        for edits in EDITS:
            i = len(edits(case)) - 1
            while i >= 0:  # from the end: what comes last needs what comes first
                smaller = edits(case)[i]
                if judge(smaller) == wanted:
                    case = smaller
                    i = min(i, len(edits(case)))
                i -= 1
        if case == before:
            break
    return case


# ---------------------------------------------------------------- one thing less


def _parts(case: Case) -> list[tuple[str, tuple[Statement, ...]]]:
    return [("session", case.session), *([] if case.fixed else [("body", case.body)])]


def _without_statements(case: Case) -> list[Case]:
    return [
        _consistent(replace(case, **{name: (*statements[:i], *statements[i + 1 :])}))
        for name, statements in _parts(case)
        for i in range(len(statements))
    ]


def _without_outputs(case: Case) -> list[Case]:
    out = []
    before = _names(case.returned)
    for name in case.returned if len(case.returned) > 1 and not case.fixed else ():
        left = tuple(n for n in case.returned if n != name)
        session = tuple(
            replace(s, text=s.text.replace(f"{before} = program", f"{_names(left)} = program"))
            for s in case.session
        )
        out.append(_consistent(replace(case, returned=left, session=session)))
    return out


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) + "," * (len(names) == 1)


def _with_simpler_statements(case: Case) -> list[Case]:
    return [
        _consistent(replace(case, **{name: (*statements[:i], simpler, *statements[i + 1 :])}))
        for name, statements in _parts(case)
        for i, statement in enumerate(statements)
        for simpler in _simpler(statement)
    ]


def _simpler(statement: Statement) -> list[Statement]:
    contexts, text = statement.within, statement.text
    fewer = [contexts[:i] + contexts[i + 1 :] for i in range(len(contexts))]
    arguments = re.findall(r", (?:\w+=)?[^,()]+(?=[,)])", text)
    return [
        *(replace(statement, within=within) for within in fewer),
        *(replace(statement, text=text.replace(part, "", 1)) for part in arguments),
    ]


def _with_plain_options(case: Case) -> list[Case]:
    odd = [name for name, plain in PLAIN.items() if case.options.get(name, plain) != plain]
    out = [replace(case, options=case.options | {name: PLAIN[name]}) for name in odd]
    out += [replace(case, tracer="")] if case.tracer else []
    out += [replace(case, small=False)] if case.small else []
    return [*out, *([] if case.dynamic is None else [replace(case, dynamic=None)])]


def _with_plain_inputs(case: Case) -> list[Case]:
    return [
        replace(case, inputs=(*case.inputs[:i], (name, plain), *case.inputs[i + 1 :]))
        for i, (name, expression) in enumerate(case.inputs)
        for plain in (re.sub(r"\.(bfloat16|half|double)\(\)", "", expression),)
        if plain != expression
    ]


def _consistent(case: Case) -> Case:
    """Names that are gone with a statement are not returned either."""
    text = " ".join(s.text for s in case.session)
    kept = tuple(n for n in case.kept if re.search(rf"\b{n}\b", text))
    return replace(case, kept=kept).trimmed()


EDITS = (
    _without_statements,
    _without_outputs,
    _with_simpler_statements,
    _with_plain_options,
    _with_plain_inputs,
)
