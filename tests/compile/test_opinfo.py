"""PyTorch's own samples of the three losses, compiled: every one right, and fused where it can be.

The samples of ``cross_entropy`` and ``nll_loss`` bring logits, so a linear with the identity as its
weight is put in front of them.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)  # of hypothesis, which the samples do not need
    from torch.testing._internal.common_methods_invocations import op_db

LINEAR = "nn.functional.linear_cross_entropy"
OPS = {
    f"{op.name.rsplit('.')[-1]} {op.variant_test_name}".strip(): op
    for op in op_db
    if op.name in (LINEAR, "nn.functional.cross_entropy", "nn.functional.nll_loss")
}


def program_of(op, sample):
    """The sample as a function of its floating-point tensors, those tensors, and whether it has
    class indices, rows and one weight for all of them, and so has to be fused."""
    if op.name == LINEAR:
        weight, target = sample.args

        def program(x, weight, bias=None):
            given = sample.kwargs | ({} if bias is None else {"linear_bias": bias})
            return F.linear_cross_entropy(x, weight, target, **given)

        bias = sample.kwargs.get("linear_bias")
        tensors = [t for t in (sample.input, weight, bias) if t is not None]
        fuses = weight.dim() == 2 and sample.input.dim() > 1 and not sample.kwargs.get("options")
        return program, tensors, fuses and not target.is_floating_point()
    (target,) = sample.args
    loss = F.nll_loss if "nll" in op.name else F.cross_entropy
    dim = min(1, sample.input.dim() - 1)

    def program(x, weight):
        logits = F.linear(x, weight).movedim(-1, dim)
        if loss is F.nll_loss:
            logits = logits.log_softmax(dim)
        return loss(logits, target, **sample.kwargs)

    x = sample.input.detach().movedim(dim, -1)
    fuses = x.dim() > 1 and not target.is_floating_point()
    return program, [x, torch.eye(x.shape[-1])], fuses


def results(program, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    loss = program(*leaves)
    loss.sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.filterwarnings("ignore:linear_cross_entropy:UserWarning")
@pytest.mark.parametrize("name", OPS)
def test_samples(name):
    op, fused, expected = OPS[name], 0, 0
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    # options= breaks the graph, so that there is nothing to fuse: a few show that it still runs
    for sample in samples[::6] if "chunked" in name else samples:
        program, tensors, fuses = program_of(op, sample)
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
        torch.testing.assert_close(
            results(compiled, tensors), results(program, tensors), equal_nan=True, msg=str(sample)
        )
        matched = counters["fusedce"]["matched"]
        assert matched == 1 or not fuses, str(sample)
        fused, expected = fused + matched, expected + fuses
    assert fused >= expected
    assert expected > 0 or "chunked" in name


@pytest.mark.filterwarnings("ignore:linear_cross_entropy:UserWarning")
@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.error_inputs_func])
def test_errors(name):
    """Whatever eager refuses is refused, with the same words."""
    for error in OPS[name].error_inputs("cpu"):
        sample = error.sample_input
        torch._dynamo.reset()

        def program(x, *args, kwargs=sample.kwargs):
            return F.linear_cross_entropy(x, *args, **kwargs)

        compiled = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
        with pytest.raises(Exception, match=error.error_regex):
            compiled(sample.input, *sample.args)
