"""Fingerprints: a digest of the bits of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fxpass.op.fingerprint import COPIED, PER_CORE, ReadOrder, fingerprint
from tests.support.allocations import Allocations
from tests.support.pairs import in_pairs

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def digest(t):
    return fingerprint(t, ReadOrder.of(t))


@in_pairs(
    layout=(
        *(lambda t: t, lambda t: t.t(), lambda t: t[:, 1:], lambda t: t[::2]),
        *(lambda t: t[1:], lambda t: t[0], lambda t: t[0, 0], lambda t: t[:0]),
    ),
    columns=(32, 33),
    dtype=DTYPES,
)
def test_fingerprints(dtype, layout, columns):
    base = torch.randn(600, columns).to(dtype)
    t = layout(base)
    before = digest(t)
    assert torch.equal(before, digest(t))
    for position in {0, t.numel() // 2, t.numel() - 1} if t.numel() else ():
        changed = layout(base.clone())
        where = np.unravel_index(position, t.shape)
        changed[where] = changed[where].mul(2) + 1
        assert not torch.equal(before, digest(changed))
    if t.dim() == 2 and t.numel():
        assert not torch.equal(before, digest(-t))
        assert not torch.equal(before, digest(t.flip(0)))
    assert before.numel() <= max(t.numel() // 8 + 8 * 256, COPIED // t.element_size())


def flip_signs(t):
    t[3, [1, 5]] *= -1
    t[7, [0, 2, 4, 6]] *= -1


def exchange(t):
    t[4, [2, 3]] = t[4, [3, 2]]


def exchange_words(t):
    t[4, :16] = t[4, :16].roll(8)


def exchange_rows(t):
    t[[1, 2]] = t[[2, 1]]


def shift_an_amount(t):
    t[5, 2] += 1
    t[5, 9] -= 1


def shift_bits(t):
    words = t.view(torch.int64)
    words[2, 1] += 2**52
    words[2, 3] -= 2**52


CHANGES = {
    "all signs": lambda t: t.neg_(),
    "some signs": flip_signs,
    "two neighbours": exchange,
    "two words": exchange_words,
    "two rows": exchange_rows,
    "an amount": shift_an_amount,
    "bits": shift_bits,
    "the order": lambda t: t.copy_(t.flip(1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_cancel_in_a_sum_change_the_digest(change, dtype):
    """Whole blocks, packed into words or strided; many are summed in several parts."""
    for rows, layout in ((256, lambda t: t), (512, lambda t: t[:, :48]), (2**15, lambda t: t)):
        t = torch.randint(1, 100, (rows, 64)).to(dtype)
        t[4] = torch.arange(64)  # neighbours differ
        before = digest(layout(t))
        CHANGES[change](t)
        assert not torch.equal(before, digest(layout(t)))


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t[:, 1:], lambda t: t[None, :, :-1]])
def test_a_fingerprint_takes_little_memory(layout):
    weight = layout(torch.zeros(2**13, 1024, dtype=torch.bfloat16))  # 16 MiB
    digest(weight)
    with Allocations() as allocations:
        mark = digest(weight)
    scratch = 4 * 8 * PER_CORE * torch.get_num_threads()
    assert allocations.peak([mark]) <= scratch + 2 * mark.nbytes
    assert mark.nbytes <= weight.nbytes / 200
