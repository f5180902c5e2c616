"""Functions of a chunk of rows with real tensors: what the pass makes of programs, as they run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph

from fxpass.op.row_chunks import prepared
from fxpass.region.compile import RowFunction
from fxpass.region.text import graph_of, lines_of
from fxpass.rows.backend import RowsPass
from tests.programs.operands import SIZES, Sizes
from tests.programs.row import Row
from tests.support.oracle import run
from tests.support.ways import WAYS

CPU = torch.device("cpu")


class Twice(torch.autograd.Function):
    """Its gradient is its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * torch.sigmoid(x)


PROGRAMS = {
    "mean": "F.cross_entropy(torch.logaddexp(z, -z), labels, label_smoothing=0.1)",
    "entropy and argmax": "p = z.log_softmax(-1); (-(p.exp() * p).sum(-1), z.argmax(-1), z.std(-1))",
    "several labels": "torch.logaddexp(z, -z).log_softmax(-1).gather(-1, candidates).tanh()",
    "class weights": "(z.log_softmax(-1) * factor).sum(-1).square().mean()",
    "teacher": "F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction='batchmean')",
    "divergence": "p, q = z.log_softmax(-1), q.log_softmax(-1); "
    "m = torch.logaddexp(p, q); (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1)",
    "largest": "z.max(-1).values, z.tanh().amax(-1)",
    "ties": "(z * 2).round().div(2).amax(-1).square()",
    "margin": "F.multi_margin_loss(z, labels, reduction='none').exp()",
    "binary": "F.binary_cross_entropy_with_logits(z, F.one_hot(labels, V).to(z.dtype))",
    "top-p": "y = z.sort(-1, descending=True).values; kept = y.softmax(-1).cumsum(-1) < 0.7\n"
    "y.masked_fill(~kept & (y < y[:, :1]), float('-inf')).logsumexp(-1)",
    "top-k": "y = z.topk(5, -1); (y.values.softmax(-1)[:, 0], y.indices.eq(4).any(-1))",
    "norms": "z.std(-1) + torch.linalg.vector_norm(z, dim=-1) + z.norm(p=1, dim=-1)",
    "own gradient": "Twice.apply(z).square().sum(-1)",
    "assigned": "y = z.clone(); y.scatter_(1, labels[:, None], -1.0); y[:, 3] = 0.5\n"
    "y.masked_fill_(z > 3, 0.0); y.logsumexp(-1).sin()",
}


@dataclass(frozen=True)
class Function:
    """A function of rows: the text of its loop, its graph with ``heads`` logits as its first
    inputs, and tensors of a run."""

    text: str
    graph: Graph
    heads: int
    tensors: list[Tensor]

    def some(self, n: int) -> list[Tensor]:
        """The tensors of the first n rows."""
        inputs = [node.meta["input"] for node in self.graph.find_nodes(op="placeholder")]
        pairs = zip(self.tensors, inputs, strict=True)
        return [t[:n] if of.shape[:1] == ("n",) else t for t, of in pairs]

    def wide(self) -> Graph:
        """The graph in float64."""
        text = "\n".join(lines_of(self.graph))
        for name in ("bfloat16", "float16", "float32"):
            text = text.replace(name, "float64")
        return graph_of(text.split("\n"))


@lru_cache
def functions(name: str, way: str = "eager", sizes: Sizes = SIZES) -> tuple[Function, ...]:
    """What runs of a program: forward, and backward where that is a call of its own."""
    row = Row(name, PROGRAMS[name], sizes=sizes, scope={"Twice": Twice})
    rows, ran, call = RowsPass(), dict[RowFunction, list[Tensor]](), RowFunction.__call__

    def recorded(self: RowFunction, tensors: list[Tensor]) -> list[Tensor]:
        ran[self] = [t.clone() for t in tensors]
        return call(self, tensors)

    torch._dynamo.reset()
    with mock.patch.object(RowFunction, "__call__", recorded):
        of = WAYS[way]
        compiled = torch.compile(row.program(), backend=rows.backend(), dynamic=of.dynamic)
        run(row, of, compiled)
    torch._dynamo.reset()
    nodes = [node for one in rows.made for node in one.graph.graph.nodes]
    calls = [node for node in nodes if node.target is torch.ops.fxpass.rows.default]
    texts = dict.fromkeys(str(node.args[1]) for node in calls)
    return tuple(
        Function(text, made.interpreter.graph, len(of.split.heads), ran[made])
        for text in texts
        for of in [prepared(text, CPU)]
        for made, _ in of._functions.values()
        if made in ran
    )
