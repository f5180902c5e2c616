"""The largest logit and its class, beside PyTorch's, with equal logits, nan and infinities."""

from __future__ import annotations

import pytest
import torch

from fxpass.aten.largest import BLOCK, LEAST, larger, largest

CLASSES = (1, 7, LEAST - 1, LEAST, LEAST + 1, LEAST + BLOCK + 77)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("special", [(), (float("nan"),), (float("inf"),), (-float("inf"),) * 3])
def test_largest(classes, special):
    z = torch.randint(-3, 3, (200, classes)).double()
    for value in special:
        z[torch.rand(z.shape) < 0.01] = value
    if special and special[0] == -float("inf"):
        z[::3] = special[0]
    highest, index = largest(z)
    assert torch.equal(index, z.argmax(1, True))
    torch.testing.assert_close(highest, z.amax(1, True), equal_nan=True, rtol=0, atol=0)


def test_the_first_of_two_parts():
    nan = float("nan")
    before, after = (
        torch.tensor([[1.0], [2.0], [2.0], [nan], [1.0], [nan]]),
        torch.tensor([[2.0], [1.0], [2.0], [1.0], [nan], [nan]]),
    )
    index = torch.arange(6)[:, None]
    highest, found = larger(before, index, after, index, 10)
    assert found.flatten().tolist() == [10, 1, 2, 3, 14, 5]
    assert highest.isnan().flatten().tolist() == [False] * 3 + [True] * 3
