"""What a report says of a call with a formula."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import torch

from fxpass.formula.reductions import Reductions
from fxpass.plan.choice import Choice
from tests.support.planned import BF16, CPU, CUDA, F32

TRAINED = Reductions((), gradients=("x", "weight"), total=("pick",))


def test_text(h200):
    said = "the gradients are computed with the outputs"
    found = [
        Choice(said, 2048, 512, 32000, F32, CPU, TRAINED),
        Choice(said, 512, 512, 32000, F32, CPU, TRAINED),
        Choice(said, 8192, 4096, 128256, BF16, CUDA, TRAINED),
    ]
    expecttest.assert_expected_inline(
        "\n".join(map(str, found)),
        """\
strategy: chunked, 352 rows at a time: 44 MiB of scratch; the gradients are computed with the outputs
strategy: chunked, 512 rows and 8000 classes at a time, the logits in the weight's gradient: 16 MiB of scratch; the gradients are computed with the outputs
strategy: chunked, 2048 rows at a time: 501 MiB of scratch, 4 chunks are added up in bf16; the gradients are computed with the outputs""",
    )


def test_a_call_of_backward_waits():
    choice = Choice("", 2048, 512, 32000, torch.float32, CPU, TRAINED)
    assert choice.strategy == "chunked"
    assert replace(choice, backward=True).strategy == "tiled"
    assert "for 2048 rows, as traced" in str(replace(choice, symbolic=True))
