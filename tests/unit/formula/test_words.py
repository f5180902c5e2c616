"""A spec in words: what a reader of a report gets in its place."""

from __future__ import annotations

import pytest

from fxpass.formula.expression import parse, text
from fxpass.formula.reductions import Reductions
from fxpass.formula.words import words
from tests.support.specs import spec_of

WORDS = {
    "outputs=pick": "log-probability of the label; no gradients",
    "gradients=x,weight total=pick": "log-probability of the label; gradients of x and weight with "
    "the loss",
    "outputs=at;lse gradients=x,weight,bias": "logit of the label, log-sum-exp; gradients of x, "
    "weight and bias in backward",
    "outputs=pick gradients=weight total=pick": "log-probability of the label; gradients of weight "
    "with the loss",
    "outputs=moment(1,1);argmax": "entropy, class of the largest logit; no gradients",
    "outputs=moment(2,0);moment(0,1);moment(1,2,1)": "sum of p**2, sum of log(p), "
    "sum of given1*p*log(p)**2; no gradients",
    "outputs=max": "largest logit; no gradients",
}


@pytest.mark.parametrize("fields", WORDS)
def test_outputs_and_gradients(fields):
    assert words(spec_of(fields)) == WORDS[fields]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("z/0.9", "z/0.9"),
        ("-z/0.9", "-z/0.9"),
        ("z/3", "z/3"),
        ("0.1*z", "0.1*z"),
        ("30*tanh(z/30)", "30*tanh(z/30)"),
        ("30*tanh(z/30)/0.9", "33.333333333333336*tanh(z/30)"),
        ("(z+1)/0.9", "z/0.9+1.1111111111111112"),
        ("-0.3*z*z/0.7", "-0.4285714285714286*z**2"),
        ("exp(z/1.1)**2", "exp(z/1.1)**2"),
    ],
)
def test_numbers_are_short_and_the_spec_is_exact(written, shown):
    transform = parse(written)
    assert words(Reductions(("lse",), transform)) == f"of {shown}: log-sum-exp; no gradients"
    assert parse(text(transform)) == transform
