"""What the programs of :mod:`benchmarks.trainers` train: a small Llama, on random tokens.

The tokens are the same in each step, so that the losses fall and a wrong gradient shows.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.trainers.task import Sizes

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
RATE = 0.1  # of plain gradient descent: Adam would hide a gradient of a wrong scale


def llama(sizes: Sizes, seed: int = 0) -> LlamaForCausalLM:
    """The same weights for the same seed, in f32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=sizes.classes,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(2 * sizes.tokens, 64),
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def tokens(sizes: Sizes, seed: int = 1) -> Tensor:
    """Random tokens of a step, int64 ``[sequences, tokens]``; none is special."""
    generator = torch.Generator().manual_seed(seed)
    shape = sizes.sequences, sizes.tokens
    return torch.randint(len(SPECIAL), sizes.classes, shape, generator=generator)


def tokenizer(sizes: Sizes) -> PreTrainedTokenizerFast:
    """Splits at blanks; the word "w7" is token 7. Its chat template writes contents alone."""
    names = [*SPECIAL, *(f"w{k}" for k in range(len(SPECIAL), sizes.classes))]
    words = {word: i for i, word in enumerate(names)}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=split,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return made


def text(ids: Tensor) -> str:
    """The words of tokens ``[T]``."""
    return " ".join(f"w{i}" for i in ids.tolist())
