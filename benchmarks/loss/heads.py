"""The heads of known models, and the suites of cases made of them.

In: the name of a suite. Out: its cases (:class:`benchmarks.loss.case.Case`)::

    >>> [str(case) for _, case in SUITES["quick"].cases("cpu")][0]
    'N=256 D=64 V=4000, float32, training'
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.loss.case import CROSS_ENTROPY, Case
from benchmarks.loss.programs import PARITY, PROGRAMS, REGIONS
from benchmarks.loss.providers import PROVIDERS


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
    # of programs other than a cross-entropy, and of fp16, which CPUs multiply slowly
    "narrow-16k": Head(256, 16000),
    "narrow-32k": Head(256, 32000),
    "thin-32k": Head(16, 32000),
}
ROWS = (1024, 2048, 4096, 8192, 16384, 32768)
Setting = tuple[bool, bool]  # autocast; a GradScaler


class Suite(NamedTuple):
    """A set of cases.

    Attributes:
        rows: head → the numbers of rows that it is measured with.
        dtypes: of the operands.
        backward: True is training, False evaluation; in this order.
        rounds: how often each provider steps.
        seconds: time limit of a provider's steps in one case; it steps at least once.
        programs: keys of :data:`benchmarks.loss.programs.PROGRAMS`.
        settings: dtype → how a step computes in it.
        providers: who is measured if nobody is named.
        kind: a key of :data:`benchmarks.loss.kinds.KINDS`.
        memory: fusedce may add so much to the memory, in units of what Inductor adds.
    """

    rows: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    backward: tuple[bool, ...] = (True,)
    rounds: int = 7
    seconds: float = math.inf
    programs: tuple[str, ...] = (CROSS_ENTROPY,)
    settings: dict[str, tuple[Setting, ...]] = {}  # noqa: RUF012 (never changed)
    providers: tuple[str, ...] = tuple(PROVIDERS)
    kind: str = "loss"
    memory: float = math.inf

    def cases(
        self, device: str, d: int = 0, v: int = 0, layers: int = 0
    ) -> Iterator[tuple[str, Case]]:
        """What stands in the title, and the case without a provider.

        Args:
            d, v: in place of each head's, if given.
            layers: in front of the head.
        """
        for program, name, dtype in itertools.product(self.programs, self.rows, self.dtypes):
            head = HEADS.get(name) or Head(512, 32000)
            title = PROGRAMS[program].title if self.kind == "programs" else "" if d or v else name
            softcap = head.softcap if program == CROSS_ENTROPY else 0.0
            settings = self.settings.get(dtype, ((False, False),))
            for n, setting, backward in itertools.product(self.rows[name], settings, self.backward):
                case = Case("", n, d or head.d, v or head.v, dtype, device, backward, softcap)
                how = {"autocast": setting[0], "scaled": setting[1]}
                yield title, dataclasses.replace(case, program=program, layers=layers, **how)


_BOTH = (True, False)
_NAMED = ("llama-3-8b", "llama-3.2-1b", "qwen3-8b", "gemma-2-2b", "gpt-2")
_BESIDE = ("eager", "inductor", "fusedce")
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
    # losses without a formula, and programs with few fused losses: memory, time, compilation
    "regions": Suite(
        {"narrow-32k": (1024,)},
        ("float32",),
        programs=tuple(REGIONS),
        providers=_BESIDE,
        kind="programs",
    ),
    "parity": Suite(
        {"narrow-16k": (2048,)},
        ("float32",),
        rounds=9,
        programs=tuple(PARITY),
        providers=_BESIDE,
        kind="programs",
        memory=1.05,
    ),
    # sizes at which an fp16 gradient underflows
    "accuracy": Suite(
        {"thin-32k": (8192,)},
        ("float32", "bfloat16", "float16"),
        rounds=0,
        settings={
            "bfloat16": ((False, False), (True, False)),
            "float16": tuple(itertools.product(_BOTH[::-1], _BOTH[::-1])),
        },
        providers=(
            *("eager", "inductor", "auto_chunker", "core"),
            *("liger_scheme", "liger_scheme_f32", "liger_scheme_sum", "fusedce"),
        ),
        kind="accuracy",
    ),
}
# On a GPU programs have the size of a model's head.
ON_GPU = {"rows": {"llama-3.2-1b": (8192,)}, "dtypes": ("bfloat16",)}
