"""Fuses one class of transformers and compares its results with eager.

In: the name of a class. Out: a row, a dictionary of plain values for a JSON line.

The whole model is traced once, and the graph with the loss is compiled in two forms:

* ``model``: unchanged, as ``torch.compile(model, backend="fusedce")`` compiles it; the returned
  logits are then used in forward and backward;
* ``loss``: the graph without its other outputs, as for a step that returns only the loss.

Loss, logits and gradients of each form have to equal eager's within ``CLOSE``, or within twice
eager's error against float64. If Dynamo's graph without fxpass differs from eager, the form is
compared with this graph, and the row says so.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import random
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import transformers
from torch import Tensor
from torch.fx import GraphModule

import fxpass
from benchmarks.compiled import Records, break_reason, short_path
from benchmarks.coverage.chain import Chain, chains
from benchmarks.coverage.models import batches, build, double, vocabulary
from benchmarks.loss.worker import FLOOR
from fxpass.backend import fusedce  # before anything is traced, as torch.compile does

FORMS = ("loss", "model")
PLAIN = "plain"  # Dynamo's graph, unchanged
CLOSE = 1e-5  # relative, in the Frobenius norm
# a gradient that is zero up to rounding is compared relative to this part of the largest norm
SCALE = 1e-3

Row = dict[str, Any]
# a hash of fxpass's source: the rows of one table may come from several states
STATE = hashlib.sha256(
    b"".join(file.read_bytes() for file in sorted(Path(fxpass.__file__).parent.rglob("*.py")))
).hexdigest()[:8]
Values = dict[str, Tensor]

os.environ.setdefault("FUSEDCE_MIN_LOGITS_MB", "0")  # the models are tiny


def examine(name: str, inner: str = "eager") -> Row:
    """The row of one class; an exception of the class or of fxpass is stored in the row."""
    warnings.simplefilter("ignore")
    row: Row = {"name": name, "stage": "build", "fxpass": STATE}
    try:
        model = build(name)
        row |= {"stage": "run", "parameters": sum(p.numel() for p in model.parameters())}
        subject = subject_of(model)
        row |= {"stage": "trace", "batch": sorted(subject.batch)}
        traced = _trace(subject, inner)
    except Exception as error:
        return row | {"error": _error(error)}
    return row | {"stage": "done", **traced}


def warm_up() -> None:
    """Prepares this process for forks: Dynamo traces a model on one thread. No backward runs,
    because autograd's threads do not survive a fork."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = build("LlamaForCausalLM")
    torch.compile(model, backend="fusedce", options={"fusedce.inner": "eager"})(
        **next(batches(model))
    )
    torch._dynamo.reset()


# ---------------------------------------------------------------- eager


@dataclass
class Subject:
    """A model and a batch for which it returns a loss."""

    model: Any
    batch: dict[str, Any]
    buffers: Values = field(default_factory=dict)

    def run(self, form: str, call: Callable[..., Any] | None = None) -> Values:
        """The loss (and the logits, in the form ``model``), then every parameter's gradient."""
        self._reset()
        out = (self.model if call is None else call)(**self.batch)
        total = _loss(out)
        values = {"loss": total.detach()}
        if form == "model":
            logits = _logits(out)
            values["mean of the logits"] = logits.float().mean().detach()
            values["logits"] = logits.detach() + 0
            total = total + logits.float().square().mean()
        total.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                values["gradient of " + name] = parameter.grad
        return values

    def double(self) -> Subject:
        """The same in float64."""
        self._reset()
        model = copy.deepcopy(self.model).double()
        return Subject(model, double(self.batch), {n: b.clone() for n, b in model.named_buffers()})

    def _reset(self) -> None:
        self.model.zero_grad()
        for name, buffer in self.model.named_buffers():
            if name in self.buffers and buffer.shape == self.buffers[name].shape:
                buffer.copy_(self.buffers[name])
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)


def subject_of(model: Any) -> Subject:
    """The model with the first batch for which eager computes a loss."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first: Exception | None = None
    for batch in batches(model):
        subject = Subject(model, batch, buffers)
        try:
            subject.run("loss")
        except Exception as error:
            first = first or error
        else:
            return subject
    assert first
    raise first


def _loss(out: Any) -> Tensor:
    loss = out["loss"] if "loss" in out else out[0]
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError("the class gives no loss for labels")
    return loss


def _logits(out: Any) -> Tensor:
    logits = out["logits"] if "logits" in out else out[1]
    if not isinstance(logits, Tensor):
        raise ValueError("the class returns no logits")
    return logits


# ---------------------------------------------------------------- traced


@dataclass
class _Graph:
    """One of Dynamo's graphs, compiled for each form."""

    chains: list[Chain]
    broken: str
    forms: dict[str, Callable[..., Any]]
    found: dict[str, list[Any]]


def _trace(subject: Subject, inner: str) -> Row:
    current = [""]  # the form that the compiled model runs
    graphs: list[_Graph] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph = _compile(gm, inputs, vocabulary(subject.model), inner)
        graphs.append(graph)
        return lambda *args: graph.forms[current[0]](*args)

    torch._dynamo.reset()
    compiled = torch.compile(subject.model, backend=backend)

    def model_in(form: str) -> Callable[..., Any]:
        def call(**batch: Any) -> Any:
            current[0] = form
            return compiled(**batch)

        return call

    forms: Row = {}
    first: list[_Graph] = []
    for form in FORMS:
        wrong, apart = compare(subject, form, model_in(form)), ""
        # does Dynamo's graph without fxpass differ from eager too?
        if wrong and (apart := compare(subject, form, model_in(PLAIN))):
            wrong = compare(subject, form, model_in(form), model_in(PLAIN))
        first = first or list(graphs)  # later, a failed guard may add graphs
        found = [record for graph in first for record in graph.found[form]]
        matched = [str(r) for r in found if hasattr(r, "losses")]
        rejected = [r.reason for r in found if type(r).__name__ == "Rejection"]
        errors = [r for r in found if isinstance(r, str)]
        forms[form] = {"matched": matched, "rejected": rejected, "errors": errors}
        forms[form] |= {"wrong": wrong, "apart": apart}
    return {
        "graphs": len(first),
        "breaks": [graph.broken for graph in first],
        "chains": [dataclasses.asdict(chain) for graph in first for chain in graph.chains],
        "forms": forms,
    }


def _compile(gm: GraphModule, inputs: list[Any], classes: int, inner: str) -> _Graph:
    found = chains([gm], classes)
    reason = getattr(gm, "compile_subgraph_reason", None)
    graph = _Graph(found, break_reason(reason), {}, {})
    graph.forms[PLAIN] = gm.forward  # the other forms change copies of gm
    for form in FORMS:
        records: list[Any] = []
        graph.found[form] = records
        if not found:
            graph.forms[form] = gm.forward
            continue
        one, fill = copy.deepcopy(gm), _as_it_is
        if form == "loss":
            fill = _keep_loss(one)
        try:
            with Records(records):
                graph.forms[form] = fill(_fusedce(one, inputs, inner))
        except Exception as error:
            records.append(_error(error))
            graph.forms[form] = gm.forward
    return graph


def _fusedce(gm: GraphModule, inputs: list[Any], inner: str) -> Callable[..., Any]:
    return fusedce(gm, inputs, options={"fusedce.inner": inner})


def _as_it_is(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def _keep_loss(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Removes all outputs but the loss; returns a wrapper that inserts None for removed outputs.

    Scalar outputs that depend on the loss remain. If there is none, because a later graph continues
    after the loss, all outputs remain.
    """
    output = next(node for node in gm.graph.nodes if node.op == "output")
    values = list(output.args[0])
    after = {n for n in gm.graph.nodes if n.op == "call_function" and "loss" in _target(n)}
    after |= {n for n in gm.graph.nodes if "cross_entropy" in _target(n)}
    for node in gm.graph.nodes:
        if after & set(node.all_input_nodes):
            after.add(node)
    kept = [
        i
        for i, node in enumerate(values)
        if node in after and _scalar(node.meta.get("example_value"))
    ]
    if not kept:
        return _as_it_is
    output.args = (tuple(values[i] for i in kept),)
    erase_unused(gm.graph, values)
    gm.recompile()

    def fill(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> tuple[Any, ...]:
            outs: list[Any] = [None] * len(values)
            for i, out in zip(kept, compiled(*args), strict=True):
                outs[i] = out
            return tuple(outs)

        return call

    return fill


def erase_unused(graph: torch.fx.Graph, nodes: list[Any]) -> None:
    """Erases nodes without users, as Dynamo does, starting at removed outputs; keeps writes."""
    nodes = [node for node in nodes if isinstance(node, torch.fx.Node)]
    while nodes:
        node = nodes.pop()
        writes = _target(node).endswith("_") or _target(node) in ("setitem", "iadd", "imul")
        if node in graph.nodes and not (node.users or writes or node.op == "placeholder"):
            before = node.all_input_nodes
            graph.erase_node(node)
            nodes += before


def _target(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


# ---------------------------------------------------------------- compared


def compare(
    subject: Subject,
    form: str,
    compiled: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
) -> str:
    """Why the compiled model's results are wrong; empty if they are correct.

    ``reference`` computes the correct results; eager by default.
    """
    right = subject.run(form, reference)
    right = {name: value.clone() for name, value in right.items()}
    try:
        got = subject.run(form, compiled)
    except Exception as error:
        return _error(error)
    if got.keys() != right.keys():
        return "only one has: " + ", ".join(sorted(got.keys() ^ right.keys())[:5])
    scale = SCALE * max(float(v.double().norm()) for n, v in right.items() if "gradient" in n)
    off = {n: _distance(got[n], right[n], scale if "gradient" in n else 0.0) for n in got}
    if max(off.values()) <= CLOSE:
        return ""
    try:
        exact = subject.double().run(form)
    except Exception as error:
        worst = max(off, key=lambda n: off[n])
        return f"{worst} is off by {off[worst]:.1e}; float64 does not run: {_error(error)}"
    for name in got:
        part = scale if "gradient" in name else 0.0
        bound = 2 * _distance(right[name], exact[name], part) + FLOOR["float32"]
        error = _distance(got[name], exact[name], part)
        if not error <= bound:
            return f"{name} is off by {error:.1e} from float64 (bound {bound:.1e})"
    return ""


def _distance(a: Tensor, b: Tensor, scale: float) -> float:
    """Distance relative to b's norm, or to ``scale`` if larger; inf if their nans differ."""
    a, b = a.detach().double(), b.detach().double()
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    # equal infinities do not differ
    gap = torch.where(a == b, 0.0, a - b).nan_to_num(posinf=float("inf")).norm()
    norm = b.nan_to_num(0.0, 0.0, 0.0).norm()
    return float(gap / max(float(norm), scale, 1e-30))


# ---------------------------------------------------------------- said in one line


def _error(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if "/fxpass/" in f.filename), frames[-1])
    text = re.sub(r"\s+", " ", str(error))[:240]
    return f"{type(error).__name__}: {text} ({short_path(frame.filename)}:{frame.lineno})"
