"""The worker process of ``python -m benchmarks.trainers``: one program with one backend.

In: a :class:`Job` as JSON in the first argument, then the command ``train``
(:func:`benchmarks.process.serve`). Out: losses, bytes, and whether logits existed as a whole.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from benchmarks.process import serve
from benchmarks.trainers.programs import PROGRAMS
from benchmarks.trainers.task import Sizes, Task


@dataclass(frozen=True)
class Job:
    """One program with one backend.

    Attributes:
        program: a name of :data:`benchmarks.trainers.programs.PROGRAMS`.
        backend: of torch.compile, or ``eager``.
        sizes: the fields of :class:`Sizes`.
    """

    program: str
    backend: str
    sizes: dict[str, int]


class Session:
    """Trains once."""

    def __init__(self, job: Job) -> None:
        self.task = Task(Sizes(**job.sizes), job.backend)
        self.train_it = PROGRAMS[job.program].load()

    def train(self) -> dict[str, Any]:
        """The losses of all steps; the bytes that a step after the first ones adds at most (None if
        unknown); what computed logits (:class:`benchmarks.trainers.task.Watch`)."""
        watch = self.task.watch
        with watch:
            self.train_it(self.task)
        return {
            "losses": self.task.losses,
            "bytes": self.task.memory.added(),
            "fused": watch.fused,
            "why": watch.why,
        }


def job_of(fields: dict[str, Any]) -> Job:
    """From JSON."""
    return Job(**{f.name: fields[f.name] for f in dataclasses.fields(Job)})


if __name__ == "__main__":
    serve(lambda fields: Session(job_of(fields)))
