"""Class reductions on GPUs: GEMMs of the vendor library and one generated kernel per part.

In: the operands of a call, as :mod:`fxpass.aten.reductions` gets them. Out: the same outputs and
gradients. A GEMM writes the logits of a chunk of rows, or in backward of a slice of the classes, in
the dtype of x; the kernel of :func:`fxpass.kernels.render.reductions` reads them, and overwrites
them with their gradient, from which GEMMs compute those of the operands::

    >>> x, weight, c = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)  # on a GPU
    >>> operands = Operands(x, weight, None, None, c, ())
    >>> spec = Reductions.parse("r5 outputs=pick;moment(1,1) gradients=x")
    >>> plan = Plan("triton", "tiled", rows=4096, classes=8192)
    >>> out, _ = forward(operands, spec, plan)
    >>> out.rows.shape  # log-probabilities and negative entropies
    torch.Size([2, 4])
    >>> backward(operands, spec, plan, out, torch.ones(2, 4))["x"].shape
    torch.Size([4, 8])

Nothing synchronises with the GPU, and the order of the sums is fixed. A CUDA graph can capture it
after a first run has compiled the kernel and tuned its blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.kernels import call, render, tuning
from fxpass.kernels.call import Candidate
from fxpass.kernels.chunked import Gradients, Part, chunks, load, logits_of, padded_buffer
from fxpass.kernels.scaling import scale_incoming
from fxpass.plan.devices import on_device
from fxpass.plan.plan import Plan
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.operands import Operands, Outputs, empty
from fxpass.spec.reductions import Reductions


def forward(operands: Operands, spec: Reductions, plan: Plan) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total, if there is one. One launch has
    both, so each logit is computed once. The dtypes are those of :class:`Gradients`."""
    out = empty(operands, spec)
    with on_device(operands.x.device):
        coef, unscale = operands.coef, None
        if coef is not None:
            coef, unscale = scale_incoming(operands, spec.total, coef)
        grads = _Run(operands, spec, out, coef, forward=True).in_chunks(plan.rows)
        _multiply(unscale, out.total, *grads.values())
        return out, grads


def backward(
    operands: Operands, spec: Reductions, plan: Plan, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that ``spec`` names, for the incoming gradients ``[R, N]`` of ``out.rows``.

    Of ``out`` it reads lse, rest and saved. With the strategy ``tiled`` it computes
    ``plan.classes`` classes of all rows at a time, unless it needs the largest logits; otherwise
    ``plan.rows`` rows. The dtypes are those of :class:`Gradients`, and f32 for the scale.
    """
    with on_device(operands.x.device):
        incoming, unscale = scale_incoming(operands, spec.rows, incoming)
        run = _Run(operands, spec, out, incoming, forward=False)
        if plan.strategy == "tiled" and render.in_slices(spec):
            grads = run.in_slices(plan.classes, unscale)
            _multiply(unscale, *(grads[name] for name in ("x", "scale") if name in grads))
        else:
            grads = run.in_chunks(plan.rows)
            _multiply(unscale, *grads.values())
        return grads


def _multiply(factor: Tensor | None, *tensors: Tensor) -> None:
    if factor is not None:
        for tensor in tensors:
            tensor.mul_(factor)


class _Run:
    """One run of the kernel over all logits: ``out`` is written in forward, read in backward;
    ``incoming`` ``[R, N]`` f32 are the gradients of the outputs, or the weights of the total's."""

    def __init__(
        self,
        operands: Operands,
        spec: Reductions,
        out: Outputs,
        incoming: Tensor | None,
        forward: bool,
    ):
        x, bias, scale, picks = operands.x, operands.bias, operands.scale, operands.picks
        self.operands, self.factor = operands, render.gradient_factor(spec)
        (self.row,) = call.for_reductions(spec, operands, call.gpu_of(x.device), forward)
        self.gradients = spec.gradients if spec.total or not forward else ()
        dtype, trained = compute_dtype(x.dtype), "scale" in self.gradients
        self.scale_grad = x.new_zeros(len(x), dtype=dtype) if trained else None
        self.of_row = {
            "scale": None if scale is None else scale.contiguous(),
            "picks": None if picks is None else operands.classes().contiguous(),
            "scale_grad": None if self.scale_grad is None else torch.empty_like(self.scale_grad),
            **{"lse": out.lse, "rest": out.rest, "total": out.total},
        }
        self.of_output = {"saved": out.saved, "incoming": incoming}
        if forward:
            self.of_output |= {"outputs": out.rows, "indices": out.indices}
        given = (w.view(torch.uint8) if w.dtype == torch.bool else w for w in operands.given)
        # vectors once, values a part at a time
        self.of_class = {
            f"given{i}": w.contiguous() if w.dim() == 1 else w for i, w in enumerate(given)
        }
        if bias is not None and call.adds_bias(operands):
            self.of_class["bias"] = bias.contiguous()
        k = 0 if picks is None else operands.classes().shape[1]
        self.sizes = {"N": len(x), "K": k, "PICKS": 1 << max(0, k - 1).bit_length()}

    def in_chunks(self, rows: int) -> dict[str, Tensor]:
        """The gradients, ``rows`` rows at a time."""
        classes = slice(0, len(self.operands.weight))
        return self._over([Part(some, classes) for some in chunks(len(self.operands.x), rows)])

    def in_slices(self, classes: int, unscale: Tensor | None) -> dict[str, Tensor]:
        """The gradients, ``classes`` classes at a time; those of the weight and the bias are
        multiplied by ``unscale``."""
        rows, v = slice(0, len(self.operands.x)), len(self.operands.weight)
        slices = [slice(i, min(i + classes, v)) for i in range(0, v, classes)]
        parts = [Part(rows, some) for some in slices] if rows.stop else []
        return self._over(parts, sliced=True, unscale=unscale)

    def _over(
        self, parts: list[Part], sliced: bool = False, unscale: Tensor | None = None
    ) -> dict[str, Tensor]:
        operands, x, buffer = self.operands, self.operands.x, None
        products = tuple(name for name in self.gradients if name != "scale")
        sums = Gradients(operands, products, self.factor, len(parts), sliced, unscale)
        if parts and (self.gradients or operands.logits is None):
            buffer = padded_buffer(x, *map(max, zip(*(part.shape for part in parts), strict=True)))
        chosen = self.row.candidates[0]
        if parts:
            # timed on the uninitialised buffer, before its first GEMM: it needs no memory, and the
            # real launch overwrites the outputs that the timing wrote
            first = logits_of(operands, parts[0], buffer, compute=False)
            chosen = tuning.best(
                load(self.row.kernel),
                x.device,
                first.dtype,
                parts[0].shape,
                self.row.candidates,
                lambda candidate: self._launch(candidate, parts[0], first, buffer),
            )
        for part in parts:
            g = self._launch(chosen, part, logits_of(operands, part, buffer), buffer)
            if g is not None and self.gradients:
                sums.add(part, g)
            if self.scale_grad is not None and (of_part := self.of_row["scale_grad"]) is not None:
                self.scale_grad[part.rows] += of_part[part.rows]
        return sums.found | ({} if self.scale_grad is None else {"scale": self.scale_grad})

    def _launch(
        self, chosen: Candidate, part: Part, logits: Tensor, buffer: Tensor | None
    ) -> Tensor | None:
        """Runs the kernel on some logits; returns the part of the buffer with their gradient."""
        rows, classes = part
        n, v = part.shape
        gradient = None if buffer is None else buffer[:n, :v]
        given = {name: t[rows] for name, t in self.of_row.items() if t is not None}
        given |= {name: t[:, rows] for name, t in self.of_output.items() if t is not None}
        sizes = {**self.sizes, "V": v, "slice_start": classes.start, "stride": logits.stride(0)}
        if gradient is not None:
            given["gradient"], sizes["gradient_stride"] = gradient, gradient.stride(0)
        for name, t in self.of_class.items():
            some = t[classes] if t.dim() == 1 else t[rows, classes]
            given[name] = some if some.stride(-1) == 1 else some.contiguous()
            sizes[f"{name}_stride"] = given[name].stride(0)
        kernel = load(chosen.kernel)
        arguments = {**given, **sizes, "logits": logits}
        known = {name: value for name, value in arguments.items() if name in kernel.arg_names}
        kernel[(n,)](**known, **chosen.options)
        return gradient
