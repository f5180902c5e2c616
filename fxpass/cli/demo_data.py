"""Real text that every machine has: the standard library of the running Python.

In: a vocabulary size. Out: :class:`Corpus`, the sources as class indices. The text is split by
``tokenize``, the most frequent tokens are the vocabulary, and index 0 stands for the others::

    >>> corpus = read_corpus(50_304)
    >>> corpus.classes, min(corpus.indices), max(corpus.indices)
    (50304, 0, 50303)
"""

from __future__ import annotations

import sysconfig
import tokenize
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = 0

# A file of the standard library's own tests may be broken on purpose.
_UNREADABLE = (SyntaxError, tokenize.TokenError, UnicodeDecodeError, OSError)


@dataclass(frozen=True)
class Corpus:
    """A text as class indices.

    Attributes:
        indices: one per token, 32-bit, in ``[0, classes)``.
        classes: size of the vocabulary, the unknown token included.
        distinct: tokens that have a class of their own.
        files: how many source files were read.
    """

    indices: array[int]
    classes: int
    distinct: int
    files: int

    def __str__(self) -> str:
        text = (
            f"{len(self.indices):,} tokens of {self.files} files of Python's standard library, "
            f"{self.distinct:,} of them distinct"
        )
        padding = self.classes - self.distinct - 1
        return text if padding <= 0 else f"{text}; {padding:,} classes are padding"


def read_corpus(classes: int, root: Path | None = None) -> Corpus:
    """Sources below ``root``, in the order of their names, until every class has its token.

    Args:
        classes: size of the vocabulary. A trimmed Python may have fewer distinct tokens; the
            remaining classes are padding then, and never occur.
        root: the standard library of the running Python by default.

    Raises:
        ValueError: no Python source below ``root``.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    words: list[str] = []
    counts: Counter[str] = Counter()
    files = 0
    for path in _sources(root):
        try:
            with tokenize.open(path) as lines:
                found = [token.string for token in tokenize.generate_tokens(lines.readline)]
        except _UNREADABLE:
            continue
        words += found
        counts.update(found)
        files += 1
        if len(counts) >= classes:
            break
    if not files:
        raise ValueError(f"no Python sources below {root}")
    # Counter.most_common keeps the order of first occurrence among equals: deterministic.
    common = counts.most_common(classes - 1)
    index = {word: i for i, (word, _) in enumerate(common, start=UNKNOWN + 1)}
    return Corpus(
        array("i", (index.get(word, UNKNOWN) for word in words)), classes, len(index), files
    )


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        # what pip installed is not the same on two machines
        if "site-packages" not in parts and "dist-packages" not in parts:
            yield path
