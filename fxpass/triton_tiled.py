"""The ``tiled`` strategy on GPUs: logits a tile at a time, in registers, and again in backward.

In: :class:`fxpass.aten.Inputs`, a spec and a plan. Out: :class:`fxpass.aten.Outputs`. Forward makes
one pass of :func:`fxpass.triton_tile_source.forward` over all logits, tile by tile; what it keeps
per row is the log-sum-exp. Backward makes the logits of some classes again, writes their gradient
to a scratch ``[N, classes]`` and lets the vendor's GEMMs add that up, already multiplied by what
arrives, so that no f32 gradient of the weight is kept::

    >>> x, w, t = torch.randn(4, 8, device="cuda"), torch.randn(10, 8, device="cuda"), ...
    >>> loss, lse, *_ = run(Inputs(x, w, None, t), Spec(strategy="tiled"), plan)

Logits that the graph holds already are not read: they are computed again. Nothing waits for the
GPU, and nothing is added up in an order that varies.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
from torch import Tensor

from fxpass import triton_source, triton_tile_config, triton_tile_source
from fxpass.aten import Inputs, Outputs
from fxpass.spec import Spec
from fxpass.triton_chunked import _add_product, _buffer, _launch_options, _on, _tiles, load
from fxpass.triton_source import Kernel
from fxpass.triton_tile_body import Gemm
from fxpass.triton_tile_config import Config
from fxpass.triton_units import in_units

# Of a weight's gradient that is rounded by a second pass, what is held in f32 at a time.
_F32_BYTES = 32 << 20

_Arguments = dict[str, "Tensor | int | float"]


class Plan(Protocol):
    """What is read of :class:`fxpass.schedule.Plan`."""

    @property
    def classes(self) -> int:
        """Classes whose gradient is held at a time."""
        ...


def run(inputs: Inputs, spec: Spec, plan: Plan) -> Outputs:
    """Losses and log-sum-exps; or, where the spec names gradients, those of
    ``sum(row_scale * loss + lse_scale * lse)``.

    Args:
        inputs: x, weight and bias in bf16, f16 or f32, with any strides; with gradients, the lse
            that forward returned.
        spec: without gradients for forward.
        plan: ``classes`` bounds the scratch of backward, ``[N, classes]`` in the dtype of x.

    Returns:
        Forward: loss and lse ``[N]`` f32. Backward: an empty loss, and the gradients in the dtypes
        of their operands, each rounded once.
    """
    with _on(inputs.x.device):
        return _backward(inputs, spec, plan.classes) if spec.gradients else _forward(inputs, spec)


# ---------------------------------------------------------------- forward


def _forward(inputs: Inputs, spec: Spec) -> Outputs:
    n, v = inputs.x.shape[0], inputs.weight.shape[0]
    loss = inputs.x.new_empty(n, dtype=torch.float32)
    lse = torch.empty_like(loss)
    if not n:
        return Outputs(loss, lse, None, None, None)
    gemm, config, arguments = _product(inputs, spec)
    per_split = triton_tile_config.per_split(n, v, config, _processors(inputs.x.device))
    splits = -(-v // per_split)
    arguments |= {"per_split": per_split, "splits": splits, "loss": loss, "lse": lse}
    for name in ("maxima", "sums", "picks", "dots", "masses"):
        arguments[name] = loss.new_empty((n, splits))
    weighted = inputs.class_weight is not None
    kernel = triton_tile_source.forward(spec, weighted, gemm)
    _launch(kernel, -(-n // config.BLOCK_N) * splits, arguments, config.options)
    arguments["SPLITS"] = 1 << (splits - 1).bit_length()
    _launch(triton_tile_source.merge(spec, weighted), n, arguments, {"num_warps": 1})
    return Outputs(loss, lse, None, None, None)


# ---------------------------------------------------------------- backward


def _backward(inputs: Inputs, spec: Spec, classes: int) -> Outputs:
    n, v = inputs.x.shape[0], inputs.weight.shape[0]
    unit = None
    if inputs.x.dtype == torch.float16:
        # of bf16 and f32 any scale can be stored: no unit, and no pass that multiplies by it
        inputs, (_, unit) = in_units(inputs, spec)
    gradients = _Gradients(inputs, spec, unit)
    if not n:
        return gradients.outputs()
    gemm, config, arguments = _product(inputs, spec)
    weighted = inputs.class_weight is not None
    if spec.target == "probabilities":
        arguments["row_mass"] = inputs.x.new_empty(n, dtype=torch.float32)
        options = _launch_options(v, torch.float32)
        kernel = triton_tile_source.mass(spec, weighted)
        _launch(
            kernel,
            n,
            arguments | {"BLOCK_V": options["BLOCK_V"]},
            {"num_warps": options["num_warps"]},
        )
    classes = max(1, classes // config.BLOCK_V) * config.BLOCK_V
    g = _buffer(inputs.x, n, min(classes, v))
    arguments |= {"g": g, "g_stride": g.stride(0)}
    kernel = triton_tile_source.backward(
        spec,
        weighted,
        inputs.row_scale is not None,
        inputs.lse_scale is not None,
        gemm,
    )
    for first in range(0, v, classes):
        tile = slice(first, min(first + classes, v))
        blocks = -(-(tile.stop - first) // config.BLOCK_V)
        arguments |= {"first": first, "class_blocks": blocks}
        _launch(kernel, -(-n // config.BLOCK_N) * blocks, arguments, config.options)
        gradients.add(g[:, : tile.stop - first], tile)
    return gradients.outputs()


class _Gradients:
    """What the gradients of logits add up to, a tile of classes at a time.

    x's gradient is a sum over tiles, so it stays f32 until the end. The weight's and the bias's are
    complete with their tile and rounded there.
    """

    def __init__(self, inputs: Inputs, spec: Spec, unit: Tensor | None):
        self._x, self._weight = inputs.x, inputs.weight
        self._factor, self._unit = triton_source.gradient_factor(spec), unit
        shapes = {"weight": inputs.weight.shape, "bias": inputs.weight.shape[:1]}
        # each tile is written, unless there are no rows and no tiles
        new = inputs.weight.new_empty if len(inputs.x) else inputs.weight.new_zeros
        self._grads = {k: new(shapes[k]) for k in spec.gradients if k != "x"}
        if "x" in spec.gradients:
            self._grads["x"] = inputs.x.new_zeros(inputs.x.shape, dtype=torch.float32)

    def add(self, g: Tensor, classes: slice) -> None:
        """``g`` ``[N, classes]``: the gradient of some classes' logits, in its unit."""
        grads, weight = self._grads, self._weight[classes]
        if "x" in grads:
            for some in _tiles(g, g.shape[1]):
                _add_product(grads["x"], g[:, some], weight[some], self._factor)
        if "bias" in grads:
            total = g.sum(0, dtype=torch.float32).mul_(self._factor)
            grads["bias"][classes] = total if self._unit is None else total.mul_(self._unit)
        if "weight" in grads:
            self._round_product(grads["weight"][classes], g.t())

    def _round_product(self, out: Tensor, g: Tensor) -> None:
        """``out = factor * unit * g @ x``, rounded once to the dtype of ``out``.

        GPUs add 16-bit products up in f32 and multiply by alpha before they round, so one GEMM does
        it all. A unit, which is a number on the device, only fits behind an f32 result: its tile
        makes one more pass over memory. So do CPUs, which round 16-bit products more often.
        """
        if self._unit is None and (out.is_cuda or out.dtype == torch.float32):
            torch.addmm(out, g, self._x, beta=0, alpha=self._factor, out=out)
            return
        step = max(1, _F32_BYTES // (4 * max(1, out.shape[1])))
        for start in range(0, len(out), step):
            some = slice(start, start + step)
            exact = torch.zeros_like(out[some], dtype=torch.float32)
            _add_product(exact, g[some], self._x, self._factor)
            out[some] = exact if self._unit is None else exact.mul_(self._unit)

    def outputs(self) -> Outputs:
        x = self._grads.get("x")
        if x is not None:
            x = (x if self._unit is None else x.mul_(self._unit)).to(self._x.dtype)
        loss = self._x.new_empty(0, dtype=torch.float32)
        return Outputs(loss, None, x, self._grads.get("weight"), self._grads.get("bias"))


# ---------------------------------------------------------------- kernels


def _product(inputs: Inputs, spec: Spec) -> tuple[Gemm, Config, _Arguments]:
    """How the logits are multiplied, and the arguments that forward and backward share."""
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    if not x.is_cuda:
        # the interpreter multiplies bf16 wrongly
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    target = triton_tile_config.target_of(x.device)
    config = triton_tile_config.configs_for(target, x.dtype)[0]
    gemm = Gemm(biased=bias is not None, precision=_precision(x.dtype, target))
    arguments: _Arguments = {"x": x, "weight": weight, **config.sizes}
    arguments |= {"x_stride": x.stride(0), "weight_stride": weight.stride(0)}
    arguments |= {"N": x.shape[0], "D": x.shape[1], "V": weight.shape[0]}
    if bias is not None:
        arguments["bias"] = bias.contiguous()
    return gemm, config, arguments | _per_row(inputs, spec)


def _per_row(inputs: Inputs, spec: Spec) -> _Arguments:
    """What is read beside x, weight and bias."""
    out: _Arguments = {}
    scales = {
        "class_weight": inputs.class_weight,
        "row_scale": inputs.row_scale,
        "lse_scale": inputs.lse_scale,
        "lse": inputs.lse,
    }
    out |= {k: t.float().contiguous() for k, t in scales.items() if t is not None}
    if inputs.class_weight is not None:
        out["class_mass"] = inputs.class_weight.sum(dtype=torch.float32)
    target = inputs.target
    if target is not None:
        target = target if target.stride(-1) == 1 else target.contiguous()
        out |= {"target": target, "target_stride": target.stride(0)}
    return out


def _precision(dtype: torch.dtype, target: str) -> str:
    """How f32 operands are multiplied: as the vendor's GEMMs are told to."""
    if dtype != torch.float32:
        return ""
    # not allow_tf32, which raises where the newer of torch's two settings was used
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 and target not in ("cpu", "sm_75") else "ieee"


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(kernel: Kernel, programs: int, arguments: _Arguments, options: dict[str, int]) -> None:
    """Runs a kernel with those of the arguments that it has a name for."""
    function = load(kernel)
    named = {name: arguments[name] for name in function.arg_names}
    function[(programs,)](**named, **options)
