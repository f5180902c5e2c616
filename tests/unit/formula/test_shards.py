"""How classes are divided over ranks."""

from __future__ import annotations

import pytest
import torch

from fxpass.formula.shards import class_shard


@pytest.mark.parametrize("classes", [1, 4, 5, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_as_by_chunk(classes, ranks):
    """Later ranks may have none."""
    parts = [part.tolist() for part in torch.arange(classes).chunk(ranks)]
    parts += [[]] * (ranks - len(parts))
    of_ranks = (class_shard(classes, ranks, rank) for rank in range(ranks))
    assert [[*range(first, first + count)] for first, count in of_ranks] == parts
