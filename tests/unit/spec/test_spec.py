"""The spec of one fused loss: text both ways, and every field's bad values."""

from __future__ import annotations

import dataclasses

import pytest

from fxpass.spec import expression
from fxpass.spec.spec import REVISION, STRATEGIES, Spec

# for every field, values that are not its default
OTHER_VALUES = {
    "reduction": ["none", "sum"],
    "target": ["none", "probabilities"],
    "ignore_index": [None, -1, 0, 5, 2**62, -(2**62)],
    "label_smoothing": [0.1, 1 / 3, 1e-7, 1.0],
    "transform": [expression.parse(s) for s in ("30*tanh(z/30)", "where(z<=0,1,z)", "-z/3+0.1")],
    "gradients": [("x",), ("weight",), ("x", "weight", "bias")],
    "lse": [True],
    "shard_of": [1, 128256],
    "strategy": ["tiled"],
    "memory_mb": [1, 4096],
}
CASES = [(name, value) for name, values in OTHER_VALUES.items() for value in values]
ALL = {name: values[-1] for name, values in OTHER_VALUES.items()}


def test_every_field_has_cases():
    assert [*OTHER_VALUES] == [field.name for field in dataclasses.fields(Spec)]
    assert set(OTHER_VALUES["strategy"]) == set(STRATEGIES) - {Spec().strategy}


@pytest.mark.parametrize(("name", "value"), CASES)
def test_one_field_round_trip(name, value):
    spec = Spec(**{name: value})
    assert Spec.parse(spec.text()) == spec
    assert getattr(Spec.parse(spec.text()), name) == value


@pytest.mark.parametrize("left_out", ALL)
def test_all_but_one_field_round_trip(left_out):
    spec = Spec(**{name: value for name, value in ALL.items() if name != left_out})
    assert Spec.parse(spec.text()) == spec
    assert f"{left_out}=" not in spec.text() or left_out == "reduction"


def test_defaults_are_left_out_and_the_order_is_fixed():
    assert Spec().text() == f"{REVISION} reduction=mean"
    assert Spec.parse(Spec().text()) == Spec()
    assert Spec(**dict(reversed(ALL.items()))).text() == (
        f"{REVISION} reduction=sum target=probabilities ignore_index=-4611686018427387904 "
        "label_smoothing=1.0 transform=0.1-z/3 gradients=x,weight,bias lse=true shard_of=128256 "
        "strategy=tiled memory_mb=4096"
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reduction", "max", "reduction must be one of none, mean, sum; got 'max'"),
        ("target", "classes", "target must be one of indices, probabilities, none; got 'classes'"),
        ("strategy", "full", f"strategy must be one of {', '.join(STRATEGIES)}; got 'full'"),
        ("gradients", ("x", "lse"), "gradients must be one of x, weight, bias; got 'lse'"),
        ("gradients", ("x", "x"), "gradients must be named once and in the order .*; got x, x"),
        ("gradients", ("weight", "x"), "gradients must be named once .*; got weight, x"),
        ("ignore_index", 1 << 63, f"ignore_index must be an int64, got {1 << 63}"),
        ("ignore_index", -(1 << 63) - 1, "ignore_index must be an int64, got -"),
        ("label_smoothing", -0.1, r"label_smoothing must be in \[0, 1\], got -0.1"),
        ("label_smoothing", 1.5, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ("label_smoothing", float("nan"), r"label_smoothing must be in \[0, 1\], got nan"),
        ("memory_mb", -1, "memory_mb must not be negative, got -1"),
        ("shard_of", -1, "shard_of must not be negative, got -1"),
    ],
)
def test_a_bad_value_is_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        Spec(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("ignore_index", None), ("label_smoothing", 0.1)])
def test_what_needs_a_target(name, value):
    with pytest.raises(ValueError, match=f"without a target {name} must be .*, got {value}"):
        Spec(target="none", **{name: value})


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("lse", [False, True])
def test_gradients_wait_for_backward_where_rows_have_their_own(reduction, lse):
    for strategy in ("chunked", "tiled"):
        spec = Spec(reduction, lse=lse, gradients=("x",), strategy=strategy)
        assert spec.waits == (lse or reduction == "none" or strategy == "tiled")
        assert bool(spec.reductions().total) == spec.totals == (not spec.waits)
        evaluation = dataclasses.replace(spec, gradients=())
        assert evaluation.totals == (reduction != "none" and not lse)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("words", "plain", "with_weights"),
    [
        ("target=none", "lse", "lse"),
        ("", "pick", "pick"),
        ("label_smoothing=0.1", "pick;moment(0,1)", "pick;moment(0,1,0)"),
        ("target=probabilities", "moment(0,1,0)", "moment(0,1,0)"),
        (
            "target=probabilities label_smoothing=0.1",
            "moment(0,1,0);moment(0,1)",
            "moment(0,1,0);moment(0,1,1)",
        ),
    ],
)
def test_the_outputs_of_a_loss(words, plain, with_weights, weighted):
    want = with_weights if weighted else plain
    spec = Spec.parse(f"{REVISION} reduction=none {words}".strip())
    assert spec.reductions(weighted).text().split(" ", 1)[1] == f"outputs={want}"
    spec = dataclasses.replace(spec, lse=True)
    both = want if want == "lse" else f"lse;{want}"
    assert spec.reductions(weighted).text().split(" ", 1)[1] == f"outputs={both}"


@pytest.mark.parametrize(
    "words",
    [
        *("reduction=MEAN", "reduction=", "reduction", "target=indices2", "strategy=a b"),
        *("ignore_index=1.5", "ignore_index=+1", "ignore_index= 1", "ignore_index=x"),
        *("ignore_index=None", "ignore_index=-none", "lse=True", "lse=1", "lse=false", "lse="),
        *("target=none ignore_index=0", "target=none label_smoothing=0.1", "target=None"),
        *("label_smoothing=nan", "label_smoothing=inf", "label_smoothing=1e", "label_smoothing=2"),
        *(
            "transform=Z",
            "transform=z,z",
            "transform='z'",
            "transform=z.real",
            "transform=gamma(z)",
            "transform=",
        ),
        *("transform=z<0", "transform=z=0", "transform=tanh(z"),
        *("gradients=", "gradients=X", "gradients=x,,weight", "gradients=x;weight"),
        *("gradients=x,x", "gradients=weight,x", "ignore_index=9223372036854775808"),
        *("memory_mb=-1", "memory_mb=1e3", "memory_mb=", "memory_mb=" + "9" * 5000),
        *("shard_of=-1", "shard_of=1e3", "shard_of=", "shard_of=0", "shard_of=all"),
        *("colour=red", "_FIELDS=1", "__class__=x", "text=x", "=mean", ""),  # no field of a spec
        *("target=indices target=indices", "memory_mb=1 memory_mb=2"),  # one of them twice
        *("reduction=sum", " memory_mb=1", "memory_mb=1 ", "memory_mb=1\n"),
    ],
    ids=lambda words: repr(words[:30]),
)
def test_text_that_is_not_a_spec_is_refused(words):
    with pytest.raises(ValueError, match="not a spec"):
        Spec.parse(f"{REVISION} reduction=mean {words}")


@pytest.mark.parametrize("word", ["colour=red", "memory_mb=1", "memory_mb=x", "transform=Z"])
def test_the_message_shows_the_text(word):
    source = f"{REVISION} memory_mb=1 {word}"
    with pytest.raises(ValueError, match="not a spec") as caught:
        Spec.parse(source)
    assert str(caught.value).startswith(f"not a spec: {source!r}")


@pytest.mark.parametrize(
    "source",
    [
        REVISION,  # the reduction always stands there
        f"{REVISION} reduction=mean memory_mb=0",  # a default
        f"{REVISION} memory_mb=1 reduction=mean",  # another order
        f"{REVISION} reduction=mean label_smoothing=0.10",
        f"{REVISION} reduction=mean transform=z/4+z/4",
        f"{REVISION} reduction=mean ignore_index=007",
    ],
)
def test_only_what_text_writes_is_read(source):
    with pytest.raises(ValueError, match="not a spec"):
        Spec.parse(source)


@pytest.mark.parametrize("source", ["v0 reduction=mean", "reduction=mean", "", f" {REVISION}"])
def test_another_revision_says_what_to_do(source):
    found = source.split(" ")[0]
    with pytest.raises(ValueError, match="clear the compile cache") as caught:
        Spec.parse(source)
    assert f"another version of fxpass ({found!r}, this is {REVISION!r})" in str(caught.value)


@pytest.mark.parametrize("whole", ["reduction=mean", "reduction=sum ignore_index=-1"])
def test_of_shard(whole):
    """Every rank returns rows and their lses."""
    spec = Spec.parse(f"{REVISION} {whole} gradients=x shard_of=12 strategy=tiled").of_shard()
    assert (spec.reduction, spec.lse, spec.waits) == ("none", True, True)


def test_specs_are_keys():
    twin = Spec(**{**ALL, "transform": expression.parse("0.1-z/3")})
    assert {Spec(**ALL): 1}[twin] == 1
    assert len({Spec(), Spec(reduction="sum"), Spec(memory_mb=1), Spec()}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        twin.reduction = "mean"  # pyright: ignore[reportAttributeAccessIssue]
