"""``fxpass.explain``: reports what the backend does to a function, without an inner compiler.

In: a callable and arguments. Out: a :class:`Report`, whose ``str()`` is for users::

    >>> def step(x, weight, target):
    ...     return torch.nn.functional.cross_entropy(x @ weight.t(), target)
    >>> x, weight, target = torch.ones(32768, 8), torch.ones(1024, 8), torch.arange(32768) % 1024
    >>> print(explain(step, x, weight, target))
    1 graph, 1 loss fused, 0 not fused, 0 casts
      fused: ...
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import config, eval_frame
from torch.fx import GraphModule

from fxpass import messages
from fxpass.casts.casts import Cast, cast_lines, note
from fxpass.deferred.watch import Computed, watched
from fxpass.graph.source import source_of
from fxpass.graph.text import graph_text
from fxpass.kernels.call import ASSUMED, Launch
from fxpass.plan.budget import size_text
from fxpass.releases.torch_2_11 import describe_encoder_layers
from fxpass.rewrite.compiled import is_compiled, reaches_compiled
from fxpass.rewrite.compiling import compile_graph
from fxpass.rewrite.dynamo import trace_through_log_once
from fxpass.rewrite.inner import InnerBackend, compile_inner
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.rejections import Rejection
from fxpass.rewrite.settled import text_after
from fxpass.rewrite.stored import with_materialised_logits
from fxpass.rewrite.transform import Outcome
from fxpass.rows.backend import RowsPass
from fxpass.settings import Settings


@dataclass(frozen=True)
class Report:
    """The matches, rejections and casts in all graphs of a function.

    Attributes:
        graphs: the number of Dynamo's graphs; 0 if nothing was traced, more than one means graph
            breaks.
        breaks: the place and reason of each graph break; nodes before and after a break cannot be
            fused with each other.
        matches: the fused heads, each with its operator calls.
        rejections, casts: the losses that were not fused and the inserted casts, each with the
            reason or the user's line.
        kernels: the Triton kernels that the matches launch on a GPU, each with ``.name``,
            ``.source``, the launch ``.options``, and the ``.gpu`` that they are for: the operands'
            GPU, else the current one, else an H200 (sm_90), which ``str()`` leaves out.
        before, after: each graph as text, before and after the rewrite.
        labels_missing: whether the function has a parameter ``labels`` and got no labels: some
            models return a loss only with labels.
        in_parts: whether the function is not compiled and calls compiled functions: the graphs are
            theirs, as in a run without ``explain``.
        computed: the deferred logits that the run computed, each with the line that reads them.
    """

    graphs: int
    breaks: tuple[str, ...]
    matches: tuple[RegionMatch, ...]
    rejections: tuple[Rejection, ...]
    casts: tuple[Cast, ...]
    kernels: tuple[Launch, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    labels_missing: bool = False
    in_parts: bool = False
    computed: tuple[Computed, ...] = ()

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits that are not materialised, one copy in the linear's dtype."""
        left = sum(match.logits_bytes for match in self.matches)
        return max(0, left - sum(computed.bytes for computed in self.computed))

    def __str__(self) -> str:
        losses = sum(match.losses for match in self.matches)
        lines = [
            f"{_count(self.graphs, 'graph')}, {_count(losses, 'loss', 'losses')} fused, "
            f"{len(self.rejections)} not fused, {_count(len(self.casts), 'cast')}"
        ]
        if self.in_parts:
            lines.append(
                "  the function is not compiled: only what it calls that is compiled is here"
            )
        for match in self.matches:
            lines.append(f"  {match}")
            lines += [f"    {call.choice}" for call in match.calls]
        records = [*_counted(map(str, self.rejections)), *cast_lines(self.casts)]
        records += [f"graph break: {place}" for place in self.breaks]
        records += [f"materialised: {computed}" for computed in self.computed]
        lines += [messages.with_code(f"  {record}", before=" " * 4) for record in records]
        if self.logits_bytes:
            lines.append(f"  logits not materialised: {size_text(self.logits_bytes)}")
        if not self.graphs:
            lines.append(
                "  nothing was traced: Dynamo is off (TORCHDYNAMO_DISABLE=1, set_stance), or the "
                "call runs no tensor operation itself (a class, a generator)"
            )
        elif not self.matches and not self.rejections:
            advice = "; call it with labels to have a loss" if self.labels_missing else ""
            lines.append(
                f"  no loss, or other reduction of logits, in any graph: nothing to fuse{advice}"
            )
        for gpu in dict.fromkeys(k.gpu for k in self.kernels if k.gpu != ASSUMED):
            names = ", ".join(kernel.name for kernel in self.kernels if kernel.gpu == gpu)
            lines.append(f"  Triton kernels on {gpu}: {names} (see .kernels)")
        return "\n".join(lines)


def _counted(lines: Iterable[str]) -> list[str]:
    """Lines that differ only in the numbers of nodes, as those of a Python loop do, as one line."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(re.sub(r"(%\w+?)_\d+\b", r"\1", line), []).append(line)
    counts = ((same[0], len(same)) for same in alike.values())
    return [f"{line} ({count} times)" if count > 1 else line for line, count in counts]


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Runs ``fn(*args, **kwargs)`` once through the rewrite, with no inner compiler.

    Args:
        fn: a function or module. If it is not compiled and calls compiled functions or modules, it
            runs as it is, and the report is about these, whatever their backend; otherwise it is
            compiled as a whole.
        args, kwargs: its arguments. The function runs, with its side effects; twice if it could
            call a compiled function and does not. As with ``torch._dynamo.explain``, all compiled
            code is dropped, and compiled again at its next call.

    Settings are read from the environment, except ``FUSEDCE=0``, which is ignored. Losses with
    smaller logits than ``FUSEDCE_MIN_LOGITS_MB`` are reported as not fused; 0 fuses them.

    Raises:
        ValueError: a setting in the environment that is not allowed.
    """
    return explain_with(Settings.read(), fn, *args, **kwargs)


def explain_with(settings: Settings, fn: Any, /, *args: Any, **kwargs: Any) -> Report:
    """:func:`explain` with settings that are not read from the environment."""
    trace_through_log_once()
    describe_encoder_layers()
    if config.caching_precompile:
        settings = with_materialised_logits(settings)
    outcomes: list[Outcome] = []
    before: list[str] = []
    after: list[str] = []
    breaks: list[str] = []
    aot_casts: list[Cast] = []

    # fxpass.deferred.dynamo looks for the backend's name, which is that of this function
    def fusedce(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        before.append(graph_text(gm))
        breaks.extend(_break_after(gm))

        def compile(rows: RowsPass) -> Callable[..., Any]:
            inner = InnerBackend("aot_eager")
            return compile_inner(inner, gm, example_inputs, settings.mixed_dtypes, record, rows)

        compiled = compile_graph(gm, settings, example_inputs, compile)
        outcomes.append(compiled.outcome)
        after.append(text_after(gm, compiled.joint_graphs))
        return compiled.function

    def record(found: list[Cast]) -> None:
        note(found)
        aot_casts.extend(found)

    # a compiled call, which module.compile() has set, would run in place of the function
    module: Any = fn
    in_parts = _runs_in_parts(fn, args, kwargs)
    in_place = getattr(module, "_compiled_call_impl", None)
    torch._dynamo.reset()
    try:
        if in_place is not None:
            module._compiled_call_impl = None
        # neither run stored code in place of the function, nor store this code
        with config.patch(caching_precompile=False), watched() as computed:
            if in_parts:
                with torch.compiler.set_stance("default", force_backend=fusedce):
                    fn(*args, **kwargs)
            if not outcomes:
                in_parts = False
                # torch.compile would change a class for good, and does not trace its construction
                compiled: Any = fn if inspect.isclass(fn) else torch.compile(fn, backend=fusedce)
                compiled(*args, **kwargs)
    finally:
        # the code traced here must not run later or count towards the recompile limit
        torch._dynamo.reset()
        if in_place is not None:
            module._compiled_call_impl = in_place
    return Report(
        graphs=len(outcomes),
        breaks=tuple(breaks),
        matches=tuple(head for o in outcomes for head in o.heads),
        rejections=tuple(r for o in outcomes for r in o.rejections),
        casts=(*(c for o in outcomes for c in o.casts), *aot_casts),
        kernels=tuple({k: None for o in outcomes for k in o.kernels}),
        before=tuple(before),
        after=tuple(after),
        labels_missing=_lacks_labels(fn, args, kwargs),
        in_parts=in_parts,
        computed=tuple(computed),
    )


def _runs_in_parts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a function is not compiled, but calls a compiled function, and Dynamo is on."""
    on = not inspect.isclass(fn) and eval_frame._stance.stance == "default"
    return on and not is_compiled(fn) and reaches_compiled(fn, *args, **kwargs)


def _lacks_labels(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    fn = getattr(fn, "_orig_mod", fn)  # of a compiled module
    try:
        signature = inspect.signature(getattr(fn, "forward", fn))
        given = signature.bind_partial(*args, **kwargs).arguments
    except (ValueError, TypeError):  # some builtins have none; a hook may change the arguments
        return False
    return "labels" in signature.parameters and given.get("labels") is None


_SWITCH = re.compile(r"torch\._dynamo\.config\.\w+ = True")


def _break_after(gm: GraphModule) -> list[str]:
    """The graph break that ended a graph, as ``file:line code: reason``; empty if none did."""
    ended = getattr(gm, "compile_subgraph_reason", None)
    if ended is None or not ended.graph_break:
        return []
    where = source_of(ended.user_stack[-1]) if ended.user_stack else "somewhere"
    lines = [line.strip() for line in ended.reason.splitlines() if line.strip()]
    said = " ".join(line for line in lines[:2] if not line.startswith("Hint"))
    # such as the setting that captures the rows of a boolean mask
    switches = dict.fromkeys(_SWITCH.findall(ended.reason))
    said += "".join(f" It is captured with {switch}." for switch in switches)
    return [f"{where}: {said}"]
