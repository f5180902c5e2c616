"""The same computations in ATen's spelling: graphs of ``torch.export`` and ``make_fx``.

Out: ``KINDS``, the programs: each of ``FUNCTIONS`` by each tracer, and calls of ``torch.ops``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.programs.program import Function, Kind

kind = Kind("ATen's spellings")
KINDS = (kind,)

aten = torch.ops.aten


class _Module(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, weight: Tensor, *rest: Tensor) -> object:
        return self.function(x, weight, *rest)


def _exported(function: Function, tensors: list[Tensor]) -> Function:
    return torch.export.export(_Module(function), tuple(tensors)).module()


def _decomposed(function: Function, tensors: list[Tensor]) -> Function:
    exported = torch.export.export(_Module(function), tuple(tensors))
    return exported.run_decompositions().module()


def _made(function: Function, tensors: list[Tensor]) -> Function:
    return make_fx(function)(*(t.detach() for t in tensors))


def _made_symbolic(function: Function, tensors: list[Tensor]) -> Function:
    traced = make_fx(function, tracing_mode="symbolic", pre_dispatch=True)
    return traced(*(t.detach() for t in tensors))


TRACERS = {
    "export().module()": _exported,
    "export, decomposed": _decomposed,
    "make_fx": _made,
    "make_fx, symbolic, before dispatch": _made_symbolic,
}


def _cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def _log_probabilities(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def _picked_minus_lse(logits, labels):
    return logits.gather(-1, labels[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _entropy(logits):
    log_probs = F.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def _with_accuracy(x, weight, bias, labels):
    logits = torch.addmm(bias, x, weight.t())
    return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


def _with_accuracy_under_no_grad(logits, labels):
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits, labels), accuracy


def _autocast_head(x, weight, labels):
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = F.linear(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.cross_entropy(logits.float(), labels)


FUNCTIONS = {
    "cross_entropy": _cross_entropy,
    "log-probabilities": _log_probabilities,
    "gather(z) - lse": _picked_minus_lse,
    "entropy": _entropy,
    "loss and accuracy": _with_accuracy,
    "loss, accuracy under no_grad": _with_accuracy_under_no_grad,
    "head under autocast, loss not": _autocast_head,
}

for _name, _function in FUNCTIONS.items():
    for _tracer, _spell in TRACERS.items():
        kind(f"{_name}, {_tracer}", "torch", "as written", spell=_spell)(_function)


@kind("aten._log_softmax and aten.gather", "torch.ops", "[N]")
def _(x, weight, labels):
    logits = aten.mm.default(x, aten.t.default(weight))
    log_probs = aten._log_softmax.default(logits, -1, False)
    return aten.gather.default(log_probs, 1, aten.unsqueeze.default(labels, 1))


@kind("aten.linear and aten.cross_entropy_loss", "torch.ops", "scalar")
def _(x, weight, labels):
    return aten.cross_entropy_loss.default(aten.linear.default(x, weight), labels)


@kind("aten.addmm and aten.nll_loss_forward", "torch.ops", "scalar")
def _(x, weight, bias, labels):
    logits = aten.addmm.default(bias, x, aten.permute.default(weight, [1, 0]))
    log_probs = aten._log_softmax.default(logits, 1, False)
    return aten.nll_loss_forward.default(log_probs, labels, None, 1, -100)[0]
