"""``fxpass demo``: the same small GPT trained by eager, Inductor and fusedce, and compared.

In: :class:`Options`. Out: progress and a report on standard output, a picture if matplotlib is
installed, and the exit status: 0 if every provider trained and all loss curves agree.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fxpass.cli import demo_report, doctor
from fxpass.cli.demo_data import read_corpus
from fxpass.cli.demo_worker import Job, Result

CLASSES = 50_304  # GPT-2's vocabulary, padded to a multiple of 64
HEAD_WIDTH = 32


@dataclass(frozen=True)
class Options:
    """What to train and with which providers; ``batch`` in sequences, ``seq`` in tokens."""

    providers: tuple[str, ...]
    device: str
    dtype: str
    steps: int
    batch: int
    seq: int
    layers: int
    heads: int
    picture: Path


class WorkerError(Exception):
    """A provider's process failed; the message holds the end of what it printed."""


def default_device() -> str:
    """``cuda`` (which is HIP's name too) if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_problem(device: str) -> str:
    """Why ``device`` cannot be used; empty if it can."""
    try:
        torch.empty(0, device=device)
        return ""
    except (RuntimeError, AssertionError) as error:
        return f"--device {device}: {str(error).splitlines()[0]}"


def default_dtype(device: str) -> str:
    """``bfloat16`` where the device computes in it, else ``float32``."""
    on_gpu = torch.device(device).type == "cuda"
    native = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if native else "float32"


def default_batch(device: str) -> int:
    """Sequences per step."""
    return 8 if torch.device(device).type == "cpu" else 16


def run(options: Options) -> int:
    """Trains with every provider and prints the comparison.

    Returns:
        0; or 1 if a provider failed, fusedce fused nothing or the curves disagree.
    """
    begin = time.perf_counter()
    providers, environ = _runnable(options)
    if not providers:
        print("fxpass demo: no provider is left to train", file=sys.stderr)
        return 1
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="fxpass-demo-") as folder:
        job = _prepare(options, Path(folder))
        for provider in providers:
            progress = Progress(provider, job.steps)
            try:
                provider_job = dataclasses.replace(job, provider=provider)
                results[provider] = _train(provider_job, Path(folder), environ, progress)
            except WorkerError as error:
                progress.end()
                print(f"fxpass demo: {provider} failed:\n{error}", file=sys.stderr)
                return 1
            progress.end()
    problems = _print_report(results, job)
    print(f"\ntook {time.perf_counter() - begin:.0f} s")
    if demo_report.draw(results, job, options.picture):
        print(f"picture: {options.picture}")
    for problem in problems:
        print(f"fxpass demo: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _runnable(options: Options) -> tuple[tuple[str, ...], dict[str, str]]:
    """The providers that can run here, and the environment for their processes."""
    environ = {"FUSEDCE_MIN_LOGITS_MB": "0", **os.environ}  # it has something to show at any size
    problem = doctor.inductor_problem(torch.device(options.device).type)
    if not problem:
        return options.providers, environ
    print(f"Inductor cannot run here: {problem}")
    print("Going on without it; fusedce hands the rest of its graph to aot_eager.\n")
    environ["FUSEDCE_INNER"] = "aot_eager"
    return tuple(p for p in options.providers if p != "inductor"), environ


def _prepare(options: Options, folder: Path) -> Job:
    """Reads the corpus, writes it into ``folder`` and prints what will be trained."""
    corpus = read_corpus(CLASSES)
    file = folder / "corpus.pt"
    torch.save(torch.frombuffer(corpus.indices, dtype=torch.int32), file)
    width = HEAD_WIDTH * options.heads
    sizes = {k: getattr(options, k) for k in ("device", "dtype", "steps", "batch", "seq", "layers")}
    job = Job(provider="", width=width, classes=corpus.classes, corpus=str(file), **sizes)
    print(f"data    {corpus}")
    blocks = options.layers * 12 * width**2
    print(
        f"model   GPT of depth {options.layers} and width {width}: {blocks / 1e6:.1f} million "
        f"parameters in its blocks, {width * corpus.classes / 1e6:.1f} million in its vocabulary"
    )
    rows = options.batch * options.seq
    print(
        f"step    {rows:,} tokens on {options.device} in {options.dtype}: logits "
        f"[{rows}, {corpus.classes}], {job.logits_bytes / 2**20:.0f} MiB a copy in float32\n"
    )
    return job


def _train(job: Job, folder: Path, environ: dict[str, str], progress: Progress) -> Result:
    """One provider in its own process, with empty compile caches so that times compare."""
    caches = folder / job.provider
    environ = {**environ, "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    command = [sys.executable, "-m", "fxpass.cli.demo_worker", json.dumps(dataclasses.asdict(job))]
    log = folder / f"{job.provider}.log"
    result = None
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "result" in message:
                result = Result(**message["result"])
            else:
                progress.show(message["step"], message["loss"], message["seconds"])
    if process.returncode or result is None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise WorkerError(f"{tail}\n(exit status {process.returncode})")
    return result


def _print_report(results: dict[str, Result], job: Job) -> list[str]:
    """Prints what was measured; returns what is wrong, one sentence each."""
    problems = []
    fused = results.get("fusedce")
    if fused is not None:
        print("\n" + demo_report.fused_text(fused))
        if not fused.counters.get("matched"):
            problems.append("fusedce fused nothing, so there is nothing to compare")
    print("\n" + demo_report.measurements_text(results))
    print("\n" + demo_report.curves_text(results))
    checks = demo_report.compare(results, job.dtype)
    print("".join(f"\n{check}" for check in checks))
    return problems + [f"the curves disagree: {check}" for check in checks if not check.agrees]


class Progress:
    """One line per provider that is rewritten in place; plain lines where that is not possible."""

    WIDTH = 30  # of the bar, in characters

    def __init__(self, provider: str, steps: int) -> None:
        self.provider, self.steps = provider, steps
        self.in_place = sys.stdout.isatty()
        first = "first step" if provider == "eager" else "first step compiles"
        if self.in_place:
            self._rewrite(f"{self._bar(0)}  {first} ...")
        else:
            print(f"{provider}: {first} ...", flush=True)

    def show(self, step: int, loss: float, seconds: float) -> None:
        """``step`` of ``steps`` is done and took ``seconds``."""
        text = f"step {step}/{self.steps}  loss {loss:.3f}  {seconds:.2f} s"
        if self.in_place:
            self._rewrite(f"{self._bar(step)}  {text}")
        elif step in (1, self.steps) or step % 10 == 0:
            print(f"{self.provider}: {text}", flush=True)

    def end(self) -> None:
        """Leaves the line as it stands."""
        if self.in_place:
            print()

    def _bar(self, step: int) -> str:
        done = self.WIDTH * step // self.steps
        return f"[{'#' * done}{'.' * (self.WIDTH - done)}]"

    def _rewrite(self, text: str) -> None:
        # \x1b[K clears what a longer text before this one left behind
        print(f"\r{self.provider:<9}{text}\x1b[K", end="", flush=True)
