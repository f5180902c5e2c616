"""Class reductions on GPUs: GEMMs of the vendor library and one generated kernel per chunk of rows.

In: the operands of a call, as :mod:`fxpass.aten.reductions` gets them. Out: the same outputs and
gradients. A GEMM writes the logits of a chunk, in the dtype of x; the kernel of
:func:`fxpass.kernels.render_reductions.reductions` reads them, and in backward overwrites them with
their gradient, from which GEMMs compute those of the operands::

    >>> x, weight, c = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)  # on a GPU
    >>> operands = Operands(x, weight, None, None, c, ())
    >>> spec = Reductions(("pick", Moment(1, 1)), gradients=("x",))
    >>> plan = Plan("triton", "chunked", rows=4096, classes=10)
    >>> out, _ = forward(operands, spec, plan)
    >>> out.rows.shape  # log-probabilities and negative entropies
    torch.Size([2, 4])
    >>> backward(operands, spec, plan, out, torch.ones(2, 4))["x"].shape
    torch.Size([4, 8])

Nothing synchronises with the GPU, and the order of the sums is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.kernels import call, render_reductions
from fxpass.kernels.call import Candidate, OfReductions
from fxpass.kernels.chunked import load, over_chunks
from fxpass.kernels.scaling import scale_incoming
from fxpass.plan.devices import on_device
from fxpass.plan.plan import Plan
from fxpass.spec.reduction_operands import Operands, Outputs, empty
from fxpass.spec.reductions import Moment, Reductions  # noqa: F401, Moment for the example


def forward(operands: Operands, spec: Reductions, plan: Plan) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total, if there is one. One launch has
    both, so each logit is computed once. The dtypes are those of :func:`backward`."""
    out = empty(operands, spec)
    with on_device(operands.x.device):
        if operands.coef is None:
            return out, _run(operands, spec, plan, out, None, forward=True)
        scaled, factor = scale_incoming(operands, spec.total, operands.coef)
        grads = _run(operands, spec, plan, out, scaled, forward=True)
        _unscale(factor, out.total, *grads.values())
        return out, grads


def backward(
    operands: Operands, spec: Reductions, plan: Plan, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that ``spec`` names, for the incoming gradients ``[R, N]`` of ``out.rows``.

    Of ``out`` it reads lse, rest and saved. Gradients are f32; that of a bf16 weight is bf16 if
    there is one chunk.
    """
    with on_device(operands.x.device):
        scaled, factor = scale_incoming(operands, spec.rows, incoming)
        grads = _run(operands, spec, plan, out, scaled, forward=False)
        _unscale(factor, *grads.values())
        return grads


def _unscale(factor: Tensor | None, *tensors: Tensor) -> None:
    if factor is not None:
        for tensor in tensors:
            tensor.mul_(factor)


def _run(
    operands: Operands,
    spec: Reductions,
    plan: Plan,
    out: Outputs,
    incoming: Tensor | None,
    forward: bool,
) -> dict[str, Tensor]:
    """Writes ``out`` in forward; returns the gradients of ``incoming``, if there are any."""
    x, v = operands.x, operands.weight.shape[0]
    of_call = OfReductions.of(operands)
    (row,) = call.for_reductions(spec, of_call, call.gpu_of(x.device), forward)
    gradients = () if incoming is None else spec.gradients
    scale_grad = None
    if "scale" in gradients:
        scale_grad = x.new_empty(len(x), dtype=torch.float32)
    wide_bias = call.adds_bias(x, operands.bias, operands.logits)
    bias = operands.bias.contiguous() if operands.bias is not None and wide_bias else None
    scale = None if operands.scale is None else operands.scale.contiguous()
    picks = None if operands.picks is None else operands.classes().contiguous()
    # vectors once, values a chunk at a time
    given = [w.contiguous() if w.dim() == 1 else w for w in operands.given]
    k = of_call.picks or 0
    sizes = {"K": k, "PICKS": 1 << max(0, k - 1).bit_length()}

    def launch(chosen: Candidate, part: slice, chunk: Tensor) -> None:
        arguments: dict[str, Tensor | int] = {
            "logits": chunk,
            "stride": chunk.stride(0),
            "N": len(x),
            "V": v,
            **sizes,
        }
        per_row = {"scale": scale, "picks": picks, "lse": out.lse, "rest": out.rest}
        per_row |= {"scale_grad": scale_grad, "total": out.total}
        arguments |= {name: t[part] for name, t in per_row.items() if t is not None}
        per_output = {"saved": out.saved, "incoming": incoming}
        if forward:
            per_output |= {"outputs": out.rows, "indices": out.indices}
        arguments |= {name: t[:, part] for name, t in per_output.items() if t is not None}
        for i, w in enumerate(given):
            some = w if w.dim() == 1 else w[part]
            some = some if some.stride(-1) == 1 else some.contiguous()
            arguments |= {f"given{i}": some, f"given{i}_stride": some.stride(0)}
        if bias is not None:
            arguments["bias"] = bias
        kernel = load(chosen.kernel)
        known = {name: value for name, value in arguments.items() if name in kernel.arg_names}
        kernel[(len(chunk),)](**known, **chosen.options)

    products = tuple(name for name in gradients if name != "scale")
    factor = render_reductions.gradient_factor(spec)
    grads = over_chunks(operands, products, plan.rows, factor, row, launch)
    return grads if scale_grad is None else grads | {"scale": scale_grad}
