"""What the tests with real trainers train: a Llama of 20,000 parameters on counting, offline.

Every text counts upward from some number modulo 196 ("w7 w8 w9 ..."), so a few steps learn a lot
and the losses that are compared are those of a model that changes. Lengths vary.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
WORDS = 196
V = len(SPECIAL) + WORDS

# How far apart the losses of two runs may be, relative. Both go down the plain gradient, which shows
# a gradient of a wrong scale (Adam would hide it) and carries each step's rounding on to the next.
RTOL = {
    torch.float32: 2e-6,  # 2**-23 = 1.2e-7 for a rounding, 16 of them
    torch.bfloat16: 2e-3,  # 2**-9, what one logit is off; its loss is off by no more
}
# Two words in bf16 are often equally likely; rounding decides which is first. (Of some 70 tokens.)
TIES = {torch.float32: 0, torch.bfloat16: 0.03}


def tokenizer() -> PreTrainedTokenizerFast:
    """Splits at blanks; knows ``SPECIAL`` and ``w0`` to ``w195``."""
    words = {word: i for i, word in enumerate([*SPECIAL, *(f"w{k}" for k in range(WORDS))])}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=split,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )


def llama() -> LlamaForCausalLM:
    """The same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=V,
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        )
    )


def texts(count: int, seed: int, shortest: int = 5, longest: int = 16) -> list[str]:
    """``count`` texts of ``shortest`` to ``longest`` words."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    return [
        " ".join(f"w{(start + k) % WORDS}" for k in range(draw(shortest, longest + 1)))
        for start in (draw(0, WORDS) for _ in range(count))
    ]


def assert_same_course(fused: Sequence[float], eager: Sequence[float], dtype: torch.dtype) -> None:
    """Two runs' losses, step by step; they have to have learned something."""
    assert len(fused) == len(eager)
    assert eager[-1] < 0.8 * eager[0], "nothing was learned, so nothing was compared"
    assert fused == pytest.approx(eager, rel=RTOL[dtype])
