"""What nothing reads leaves no text, and what is left computes the same."""

from __future__ import annotations

import random

import pytest

from fxpass.kernels.template import without_unread

HEAD = "@jit\ndef f(\n    x,\n    y,\n):\n"


def left(body: str) -> str:
    """The body without what nothing reads."""
    return without_unread(HEAD + body).partition("):\n")[2]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("    a = x\n    b = a\n    store(x)\n", "    store(x)\n"),
        ("    # why\n    # so\n    a = x\n    store(y)\n", "    store(y)\n"),
        ("    a = 0\n    a = 1\n    store(a)\n", "    a = 1\n    store(a)\n"),
        ("    a = 0\n    a += 1\n    store(a)\n", None),
        ("    a = 0\n    a += 1\n    store(x)\n", "    store(x)\n"),
        ("    a, b = x\n    store(b)\n", None),
        # the next turn reads what this one writes
        ("    a = 0\n    b = 0\n    for i in x:\n        b = a\n        a = i\n    store(b)\n", None),
        ("    a = 0\n    for i in x:\n        a += i\n    store(x)\n", "    store(x)\n"),
        ("    a = 0\n    for i in x:\n        a = i\n    a = 1\n    store(a)\n", "    a = 1\n    store(a)\n"),
        # a loop may have no turn, and a branch may not be taken
        ("    a = 0\n    for i in x:\n        a = i\n    store(a)\n", None),
        ("    a = 0\n    if x:\n        a = 1\n    store(a)\n", None),
        ("    a = 0\n    if x:\n        a = 1\n    store(y)\n", "    store(y)\n"),
        ("    for i in x:\n        a = 1\n        store(i)\n", "    for i in x:\n        store(i)\n"),
        ("    a = 1\n\n    b = 1\n\n    store(x)\n\n    c = 1\n", "\n    store(x)\n"),
    ],
)  # fmt: skip
def test_what_is_left(body, want):
    assert left(body) == (body if want is None else want)


def test_functions_and_parameters():
    functions = "@jit\ndef a(x):\n    return b(x)\n\n\n@jit\ndef b(x):\n    return x\n\n\n"
    lists = '@jit(names=["x", "y"])\n'
    kernel = "def f(\n    x,\n    y,\n):\n    {}\n"
    everything = functions + "@jit\n" + kernel.format("store(a(x), y)")
    assert without_unread(everything) == everything
    assert "def a" not in without_unread(functions + "@jit\n" + kernel.format("store(b(x))"))
    assert without_unread(functions + lists + kernel.format("store(y)")) == (
        '@jit(names=["y"])\ndef f(\n    y,\n):\n    store(y)\n'
    )


NAMES = "abcdxy"


def body_of(chosen: random.Random, depth: int = 0, loops: int = 0) -> list[str]:
    """Random statements, in so many loops."""
    lines = []
    for _ in range(chosen.randint(1, 5)):
        one, two, three = chosen.choices(NAMES, k=3)
        kind = chosen.random()
        if kind < 0.45 or depth == 3:
            lines.append(f"{one} {chosen.choice(['=', '+='])} {two} + {three} % 7")
        elif kind < 0.6:
            counted = [f"i{i}" for i in range(loops)]
            lines.append(f"store({chosen.choice([one, *counted])})")
        elif kind < 0.7:
            lines.append(f"{one}, {two} = {three}, {one} + 1")
        else:
            looped = kind < 0.85
            head = f"for i{loops} in range({two} % 3):" if looped else f"if {two} % 2:"
            lines += [head, *(f"    {x}" for x in body_of(chosen, depth + 1, loops + looped))]
    return lines


def stored(module: str) -> list[int]:
    found: list[int] = []
    names = {"jit": lambda f: f, "store": found.append}
    exec(module, names)
    f = names["f"]
    parameters = f.__code__.co_varnames[: f.__code__.co_argcount]
    f(**{name: {"x": 3, "y": 5}[name] for name in parameters})
    return found


def test_random_programs_store_the_same():
    chosen, shorter = random.Random(0), 0
    start = [f"{name} = {i}" for i, name in enumerate("abcd")]
    for _ in range(400):
        lines = [*start, *body_of(chosen), f"store({chosen.choice(NAMES)})"]
        module = HEAD + "".join(f"    {line}\n" for line in lines)
        less = without_unread(module)
        shorter += len(less) < len(module)
        assert stored(less) == stored(module), module
    assert shorter > 300
