"""Class reductions on GPUs: GEMMs of the vendor library and one generated kernel per part.

In: the operands of a call, as :mod:`fxpass.aten.reductions` gets them. Out: the same outputs and
gradients. A GEMM writes the logits of a chunk of rows, or in backward of a slice of the classes, in
the dtype of x; the kernel of :func:`fxpass.kernels.render.reductions_kernel` reads them and
overwrites them with their gradient, from which GEMMs compute the gradients of the operands::

    >>> x, weight, c = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)  # on a GPU
    >>> operands = Operands(x, weight, None, None, c, ())
    >>> spec = Reductions(("pick",), gradients=("x",))
    >>> plan = Plan("triton", "tiled", rows=4096, classes=8192)
    >>> out, _ = forward(operands, spec, plan)
    >>> out.rows.shape  # log-probabilities
    torch.Size([1, 4])
    >>> backward(operands, spec, plan, out, torch.ones(1, 4))["x"].shape
    torch.Size([4, 8])

Nothing synchronises with the GPU, and the order of the sums is fixed. A CUDA graph can capture a
call after a first call has compiled the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxpass.formula.operands import Operands, Outputs, empty_outputs
from fxpass.formula.reductions import Reductions
from fxpass.kernels import call, render
from fxpass.kernels.chunked import (
    Gradients,
    LogitsPart,
    class_parts,
    gradient_dtypes,
    jit_function,
    logits_of,
    row_parts,
)
from fxpass.kernels.scaling import scale_incoming
from fxpass.plan.devices import on_device
from fxpass.plan.parts import padded
from fxpass.plan.plan import Plan


def forward(operands: Operands, spec: Reductions, plan: Plan) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total, if there is one. One launch
    computes both, so each logit is computed once. See :func:`gradient_dtypes`."""
    out = empty_outputs(operands, spec)
    with on_device(operands.x.device):
        coef = operands.coef
        unscale = None
        if coef is not None:
            coef, unscale = scale_incoming(operands, spec.total, coef, spec.transform)
        grads = _Run(operands, spec, out, coef, plan).over_parts(row_parts(operands, plan.rows))
        _multiply(unscale, *grads.values())
        return out, grads


def backward(
    operands: Operands, spec: Reductions, plan: Plan, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that ``spec`` names, for the incoming gradients ``[R, N]`` of ``out.rows``.

    Reads lse, rest and saved of ``out``. Computes ``plan.classes`` classes of all rows at a time if
    the strategy is ``tiled``, otherwise ``plan.rows`` rows. See :func:`gradient_dtypes`.
    """
    with on_device(operands.x.device):
        incoming, unscale = scale_incoming(operands, spec.rows, incoming, spec.transform)
        run = _Run(operands, spec, out, incoming, plan, forward=False)
        if plan.strategy == "tiled":
            grads = run.over_parts(
                class_parts(operands, plan.classes), sliced=True, unscale=unscale
            )
            _multiply(unscale, *(t for name, t in grads.items() if name == "x"))
        else:
            grads = run.over_parts(row_parts(operands, plan.rows))
            _multiply(unscale, *grads.values())
        return grads


def _multiply(factor: Tensor | None, *tensors: Tensor) -> None:
    if factor is not None:
        for tensor in tensors:
            tensor.mul_(factor)


class _Run:
    """One run of the kernel over all logits: forward writes ``out``, backward reads it;
    ``incoming`` ``[R, N]`` f32 are the gradients of the outputs, or the weights of a total."""

    def __init__(
        self,
        operands: Operands,
        spec: Reductions,
        out: Outputs,
        incoming: Tensor | None,
        plan: Plan,
        forward: bool = True,
    ):
        x = operands.x
        picks = operands.picks
        scale = operands.scale
        k = operands.pick_count
        self.operands = operands
        self.spec = spec
        self.plan = plan
        (self.row,) = call.for_reductions(spec, operands, call.gpu_of(x.device), forward)
        self.gradients = spec.gradients if spec.total or not forward else ()
        if picks is not None:
            picks = operands.picked_classes().contiguous()
        bias = operands.bias if call.adds_bias(operands) else None
        # the tensors that a kernel may read or write, by the dimension that is divided into parts
        of_rows = {"lse": out.lse, "rest": out.rest, "picks": picks}
        of_rows |= {"scale": None if scale is None else scale.contiguous()}
        of_outputs = {"outputs": out.rows, "indices": out.indices, "saved": out.saved}
        of_outputs |= {"incoming": incoming}
        of_classes = {"bias": None if bias is None else bias.contiguous()}
        for i, w in enumerate(operands.given):
            of_classes[f"given{i}"] = w.view(torch.uint8) if w.dtype == torch.bool else w
        named = set(jit_function(self.row.kernel).arg_names)
        self.of_rows, self.of_outputs, self.of_classes = (
            {name: t for name, t in tensors.items() if t is not None and name in named}
            for tensors in (of_rows, of_outputs, of_classes)
        )
        self.sizes = {"N": len(x), "K": k, "PICKS": 1 << max(0, k - 1).bit_length()}
        self.sizes |= _strides(self.of_rows | self.of_outputs)

    def over_parts(
        self, parts: list[LogitsPart], sliced: bool = False, unscale: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Computes the parts of the logits in order, and returns the gradients. If the parts are
        slices of the classes, ``unscale`` multiplies those of the weight and the bias."""
        operands = self.operands
        x = operands.x
        dtypes = {}
        if self.gradients:
            dtypes = gradient_dtypes(operands, self.spec, self.plan, parts, sliced)
        sums = Gradients(operands, dtypes, render.gradient_factor(self.spec), unscale)
        if not parts:
            return sums.found
        n, v = parts[0].shape  # no part is larger than the first
        buffer = x.new_empty((n, padded(v)))
        for part in parts:
            logits = logits_of(operands, part, buffer)
            self._launch(part, logits)
            if self.gradients:
                sums.add(part, logits)
        return sums.found

    def _launch(self, part: LogitsPart, logits: Tensor) -> None:
        """Runs the kernel on a part of the logits, which may be overwritten with their gradient."""
        kernel = jit_function(self.row.kernel)
        rows, classes = part
        n, v = part.shape
        given = {"logits": logits}
        for name, t in self.of_classes.items():
            t = t[classes] if t.dim() == 1 else t[rows, classes]
            given[name] = t if t.stride(-1) in (0, 1) else t.contiguous()
        sizes = {**self.sizes, "V": v, "slice_start": classes.start, "stride": logits.stride(0)}
        sizes |= _strides(given)
        given |= {name: t[rows] for name, t in self.of_rows.items()}
        given |= {name: t[:, rows] for name, t in self.of_outputs.items()}
        arguments = {k: t for k, t in (given | sizes).items() if k in kernel.arg_names}
        kernel[(n,)](**arguments, **self.row.options)


def _strides(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The strides that a kernel may read, by name; a part has the strides of the whole."""
    found = {f"{name}_stride": t.stride(0) for name, t in tensors.items()}
    return found | {f"{name}_step": t.stride(-1) for name, t in tensors.items()}
