"""The heads of known models, and the suites of cases made of them.

In: the name of a suite. Out: its cases (:class:`benchmarks.loss.case.Case`)::

    >>> [str(case) for _, case in SUITES["quick"].cases("cpu")][0]
    'N=256 D=64 V=4000, float32, training'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.loss.case import Case


class Head(NamedTuple):
    """The last linear of a model: hidden size, classes, and the cap on its logits (0: none)."""

    d: int
    v: int
    softcap: float = 0.0


# Sizes as in each model's config.json (hidden_size, vocab_size, final_logit_softcapping).
HEADS = {
    "llama-3-8b": Head(4096, 128256),
    "llama-3.2-1b": Head(2048, 128256),
    "qwen3-8b": Head(4096, 151936),
    "gemma-2-2b": Head(2304, 256000, softcap=30.0),
    "gpt-2": Head(768, 50257),
    # sizes that two CPU cores compute in seconds
    "cpu-32k": Head(512, 32000),
    "cpu-128k": Head(1024, 128256),
    "tiny": Head(64, 4000),
    # classifiers, whose logits are small
    "classes-10": Head(64, 10),
    "classes-16": Head(64, 16),
    "classes-100": Head(256, 100),
    "classes-1000": Head(256, 1000),
    "classes-8k": Head(512, 8192),
}
ROWS = (1024, 2048, 4096, 8192, 16384, 32768)


class Suite(NamedTuple):
    """A set of cases.

    Attributes:
        rows: head → the numbers of rows that it is measured with.
        dtypes: of x and weight.
        backward: True is training, False evaluation; in this order.
        rounds: how often each provider steps.
        seconds: time limit of a provider's steps in one case; it steps at least once.
    """

    rows: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    backward: tuple[bool, ...]
    rounds: int
    seconds: float

    def cases(self, device: str) -> Iterator[tuple[str, Case]]:
        """The name of the head, and the case without a provider."""
        for name, sizes in self.rows.items():
            head = HEADS[name]
            for dtype in self.dtypes:
                for n in sizes:
                    for backward in self.backward:
                        yield (
                            name,
                            Case("", n, head.d, head.v, dtype, device, backward, head.softcap),
                        )


_BOTH = (True, False)
_NAMED = ("llama-3-8b", "llama-3.2-1b", "qwen3-8b", "gemma-2-2b", "gpt-2")
SUITES = {
    "quick": Suite({"tiny": (256,)}, ("float32",), _BOTH, rounds=3, seconds=1),
    "cpu": Suite(
        {"cpu-32k": (2048,), "cpu-128k": (1024,)}, ("float32", "bfloat16"), _BOTH, 5, seconds=12
    ),
    "small": Suite(
        {
            "classes-10": (32,),
            "classes-16": (65536, 1_000_000),
            "classes-100": (256, 4096),
            "classes-1000": (256, 4096, 16384),
            "classes-8k": (1024, 2048),
        },
        *(("float32", "bfloat16"), _BOTH, 21, 5),
    ),
    "gpu": Suite(dict.fromkeys(_NAMED, ROWS), ("bfloat16",), _BOTH, rounds=7, seconds=20),
}
