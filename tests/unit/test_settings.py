"""Every setting: where it is read from, what is allowed, what a user is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fxpass
from fxpass import messages
from fxpass.backend import misnamed
from fxpass.settings import PREFIX, TABLE, Settings

# per setting: what may be written and the value that comes of it (accepted: in the environment and
# as an option; options: as an option only), then what is refused, likewise
CASES = {
    "enabled": SimpleNamespace(
        accepted=[("0", False), ("1", True)],
        options=[(False, False), (True, True), (0, False), (1, True)],
        refused=["true", "no", "2", " 1"],
        refused_options=[2, None, [], 0.5],
    ),
    "inner": SimpleNamespace(
        accepted=[("eager", "eager"), ("aot_eager", "aot_eager"), ("inductor", "inductor")],
        options=[],
        refused=["fusedce", "fxpass", "gcc", "Eager"],
        refused_options=[None, 1, [], print],
    ),
    "logits": SimpleNamespace(
        accepted=[(mode, mode) for mode in ("auto", "defer", "keep", "drop")],
        options=[],
        refused=["delete", "KEEP"],
        refused_options=[None, True, []],
    ),
    "mixed_dtypes": SimpleNamespace(
        accepted=[("error", "error"), ("cast", "cast")],
        options=[],
        refused=["raise", "Cast"],
        refused_options=[None, False, []],
    ),
    "strategy": SimpleNamespace(
        accepted=[("chunked", "chunked"), ("tiled", "tiled"), ("auto", "auto")],
        options=[],
        refused=["full", "auto "],
        refused_options=[None, 1, {}],
    ),
    "memory_mb": SimpleNamespace(
        accepted=[("512", 512), ("0", 0)],
        options=[(512, 512), (8.0, 8), (0, 0)],
        refused=["-1", "1.5", "many", "1e3", "inf", "nan"],
        refused_options=[-1, 1.5, True, None, [], float("inf"), float("nan"), 10**400],
    ),
    "accumulate": SimpleNamespace(
        accepted=[("float32", "float32"), ("auto", "auto")],
        options=[],
        refused=["bfloat16", "f32"],
        refused_options=[None, 1, torch.float32],
    ),
    "min_logits_mb": SimpleNamespace(
        accepted=[("0.5", 0.5), ("64", 64.0), ("0", 0.0)],
        options=[(0.5, 0.5), (64, 64.0)],
        refused=["-0.5", "big", "inf", "nan"],
        refused_options=[-1, True, None, [], float("inf"), float("nan"), 10**400],
    ),
    "dump": SimpleNamespace(
        accepted=[("somewhere", "somewhere")],
        options=[(Path("some") / "where", str(Path("some") / "where"))],
        refused=[],  # any text is a path
        refused_options=[1, None, True, b"somewhere"],
    ),
}


def rows(*kinds: str) -> list:
    return [
        pytest.param(name, entry, id=f"{name}-{kind}-{i}")
        for name, case in CASES.items()
        for kind in kinds
        for i, entry in enumerate(getattr(case, kind))
    ]


def test_every_row_has_cases_and_every_field_a_row():
    assert [*CASES] == [*TABLE] == [field.name for field in dataclasses.fields(Settings)]
    assert len({row.variable for row in TABLE.values()}) == len(TABLE)


def test_defaults():
    assert Settings.read({}, environ={}) == Settings.read(environ={}) == Settings()


@pytest.mark.parametrize(("name", "entry"), rows("accepted"))
def test_accepted_in_the_environment(name, entry, monkeypatch):
    raw, value = entry
    expected = dataclasses.replace(Settings(), **{name: value})
    assert Settings.read(environ={TABLE[name].variable: raw}) == expected
    monkeypatch.delenv("FUSEDCE_MIN_LOGITS_MB")
    monkeypatch.setenv(TABLE[name].variable, raw)
    assert Settings.read() == expected
    assert type(getattr(Settings.read(), name)) is type(value)


@pytest.mark.parametrize(("name", "entry"), rows("accepted", "options"))
def test_accepted_as_option(name, entry):
    raw, value = entry
    read = Settings.read({PREFIX + name: raw}, environ={})
    assert read == dataclasses.replace(Settings(), **{name: value})
    assert type(getattr(read, name)) is type(value)


@pytest.mark.parametrize(("name", "raw"), rows("refused"))
def test_refused_in_the_environment(name, raw):
    with pytest.raises(ValueError, match="is not allowed") as caught:
        Settings.read(environ={TABLE[name].variable: raw})
    row = TABLE[name]
    assert str(caught.value) == f"{row.variable}={raw!r} is not allowed; use {row.allowed}"


@pytest.mark.parametrize(("name", "raw"), rows("refused", "refused_options"))
def test_refused_as_option(name, raw):
    with pytest.raises(ValueError, match="is not allowed") as caught:
        Settings.read({PREFIX + name: raw}, environ={})
    assert str(caught.value) == f"fusedce.{name}={raw!r} is not allowed; use {TABLE[name].allowed}"


@pytest.mark.parametrize("name", TABLE)
def test_the_message_names_every_word_that_is_allowed(name):
    for raw, _ in CASES[name].accepted:
        if name not in ("memory_mb", "min_logits_mb", "dump"):
            assert raw in TABLE[name].allowed


@pytest.mark.parametrize(
    ("name", "option", "variable", "default"),
    [
        ("inner", "eager", "aot_eager", "inductor"),
        ("mixed_dtypes", "cast", "error", "cast"),
        ("memory_mb", 7, "9", 0),
        ("dump", "a", "b", ""),
        ("enabled", True, "0", True),
    ],
)
def test_option_before_environment_before_default(name, option, variable, default):
    environ = {TABLE[name].variable: variable}
    options = {PREFIX + name: option}
    assert getattr(Settings.read(options, environ), name) == option
    assert str(getattr(Settings.read({}, environ), name)) in (variable, "False")
    assert getattr(Settings.read({}, {}), name) == default


@pytest.mark.parametrize("name", TABLE)
def test_an_empty_variable_is_no_setting(name):
    assert Settings.read(environ={TABLE[name].variable: ""}) == Settings()


def test_an_unknown_variable_is_refused():
    with pytest.raises(
        ValueError, match="unknown environment variable 'FUSEDCE_STRATEGI'"
    ) as caught:
        Settings.read(environ={"FUSEDCE_STRATEGI": "chunked"})
    assert all(row.variable in str(caught.value) for row in TABLE.values())


@pytest.mark.parametrize("key", ["fusedce.strategi", "fusedce.", "fusedce.Strategy"])
def test_an_unknown_option_is_refused(key):
    with pytest.raises(ValueError, match=f"unknown option '{key}'") as caught:
        Settings.read({key: "chunked"}, environ={})
    assert all(PREFIX + name in str(caught.value) for name in TABLE)


def test_what_is_not_ours_is_left_alone():
    options = {"max_autotune": True, "fusedcee.inner": 1}
    environ = {"FUSED_CE": "x", "TORCH_LOGS": "x", "MY_FUSEDCE_INNER": "x", "FUSEDCEX": "x"}
    assert Settings.read(options, environ) == Settings()
    # another backend may have an option of the name of one of ours; switched off, nothing is read
    others = Settings.read({"strategy": "full", "fusedce.inner": "tvm"}, environ={})
    assert others == Settings(inner="tvm")
    assert Settings.read({"strategy": "full"}, environ={"FUSEDCE": "0"}) == Settings(enabled=False)


@pytest.mark.parametrize("inner", ["inductor", "aot_eager", "eager"])
def test_an_option_without_its_prefix_gets_a_hint(inner):
    options = {"max_autotune": True, "strategy": "chunked"}
    with pytest.raises(ValueError, match=r"did you mean fusedce\.strategy") as caught:
        Settings.read(options, environ={"FUSEDCE_INNER": inner})
    assert f"{inner} has no option 'strategy'" in str(caught.value)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().inner = "eager"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_bad_option_reaches_the_user_of_torch_compile():
    def f(x):
        return F.relu(x)

    compiled = torch.compile(
        f, backend="fusedce", options={"fusedce.inner": "eager", "fusedce.strategy": "full"}
    )
    with pytest.raises(ValueError, match=r"fusedce\.strategy='full' is not allowed") as caught:
        compiled(torch.ones(2))
    assert "use auto, chunked, tiled" in str(caught.value)


def test_the_name_of_the_package_is_no_backend():
    """It is an entry point, so that torch says how the backend is named."""
    entries = (Path(fxpass.__file__).parents[1] / "pyproject.toml").read_text()
    assert 'fxpass = "fxpass.backend:misnamed"' in entries.partition("torch_dynamo_backends]")[2]
    with pytest.raises(ValueError, match=messages.BACKEND_NAME):
        torch.compile(F.relu, backend=misnamed)(torch.ones(2))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("fusedce.strategi", "fusedce.strategy"),
        ("fusedce.min_logit_mb", "fusedce.min_logits_mb"),
        ("fusedce.mixeddtypes", "fusedce.mixed_dtypes"),
        ("FUSEDCE_LOGIT", "FUSEDCE_LOGITS"),
    ],
)
def test_a_typing_error_gets_a_hint(key, meant):
    given = ({key: "x"}, {}) if key.startswith(PREFIX) else ({}, {key: "x"})
    with pytest.raises(ValueError, match=f"{key}': did you mean '{meant}'"):
        Settings.read(*given)
    with pytest.raises(ValueError, match=r"'fusedce\.qqq'; fxpass has FUSEDCE, FUSEDCE_INNER"):
        Settings.read({"fusedce.qqq": 1}, {})
