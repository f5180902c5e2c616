"""The ``tiled`` strategy on GPUs: tiles of logits in registers, recomputed in backward.

In: :class:`fxpass.spec.operands.Inputs` and a spec. Out: :class:`fxpass.spec.operands.Results`.
Forward computes all logits in one pass of :func:`fxpass.kernels.render.forward`, and returns
the loss and lse of each row. Backward recomputes the logits of some classes, multiplies their
gradient by the incoming gradient, and writes it to scratch memory ``[N, classes]``. The vendor's
GEMMs multiply it with the operands. The weight's gradient needs no f32 sums::

    >>> x, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)  # on a GPU
    >>> inputs = Inputs(x, weight, None, target)
    >>> loss, lse, *_ = run(inputs, Spec(strategy="tiled"), classes=8192)
    >>> loss.shape, lse.shape
    (torch.Size([4]), torch.Size([4]))

Existing logits in the inputs are not read but recomputed. Nothing synchronises with the GPU, and
the order of the sums is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fxpass.kernels import call, render, tile_config
from fxpass.kernels.call import Candidate, Launch, Operands
from fxpass.kernels.chunked import best, class_tiles, load, padded_buffer, product
from fxpass.kernels.scaling import scale_coefficients
from fxpass.kernels.tile_config import Config
from fxpass.plan.devices import on_device
from fxpass.spec.operands import Inputs, Results
from fxpass.spec.spec import Spec

# Bytes of the f32 tile of a weight's gradient that is rounded in a second pass.
_F32_BYTES = 32 << 20

_Arguments = dict[str, Any]  # tensors, descriptors of tensors and numbers


def run(inputs: Inputs, spec: Spec, classes: int) -> Results:
    """Losses and log-sum-exps; or, if the spec names gradients, the gradients of
    ``sum(row_scale * loss + lse_scale * lse)``.

    Args:
        inputs: x, weight and bias in bf16, f16 or f32, with any strides; for backward, also the lse
            and lse_rest that forward returned.
        spec: without gradients for forward.
        classes: classes of one tile in backward; its scratch is ``[N, classes]`` in the dtype of x.

    Returns:
        Forward: loss, lse and lse_rest ``[N]`` f32. Backward: the gradients in the dtypes of their
        operands, each rounded once.
    """
    with on_device(inputs.x.device):
        return _backward(inputs, spec, classes) if spec.gradients else _forward(inputs, spec)


# ---------------------------------------------------------------- forward


def _forward(inputs: Inputs, spec: Spec) -> Results:
    n, v = inputs.x.shape[0], inputs.weight.shape[0]
    loss = inputs.x.new_empty(n, dtype=torch.float32)
    lse, rest = torch.empty_like(loss), torch.empty_like(loss)
    if not n:
        return Results(loss, lse, lse_rest=rest)
    logits = _Logits(inputs, spec)
    forward, merge = logits.launches["forward"], logits.launches["merge"]
    # the partial sums: what one kernel writes and the other reads
    shared = set(load(forward.kernel).arg_names) & set(load(merge.kernel).arg_names)
    names = sorted(shared - logits.arguments.keys() - {"splits", "per_split"})

    def sums(config: Config) -> _Arguments:
        """Partial sums, written to new tensors, and how the classes are split."""
        per_split = tile_config.per_split(n, v, config, forward.gpu.processors)
        splits = -(-v // per_split)
        out: _Arguments = {"per_split": per_split, "splits": splits}
        out |= {name: loss.new_empty((n, splits)) for name in names}
        logits.launch(forward, config, splits, out)
        return out

    parts = sums(logits.config(forward, sums))
    parts |= {"loss": loss, "lse": lse, "lse_rest": rest}
    _launch(merge.candidates[0], n, logits.arguments | parts)
    return Results(loss, lse, lse_rest=rest)


# ---------------------------------------------------------------- backward


def _backward(inputs: Inputs, spec: Spec, classes: int) -> Results:
    x = inputs.x
    n, v = x.shape[0], inputs.weight.shape[0]
    unscale = None
    if x.dtype == torch.float16:
        # bf16 and f32 have the range for any gradient and need no scaling
        inputs, (_, unscale) = scale_coefficients(inputs, spec)
    gradients = _Gradients(inputs, spec, unscale)
    if not n:
        return gradients.outputs()
    logits = _Logits(inputs, spec)
    if "mass" in logits.launches:
        logits.arguments["row_mass"] = x.new_empty(n, dtype=torch.float32)
        _launch(logits.launches["mass"].candidates[0], n, logits.arguments)
    backward = logits.launches["backward"]
    widest = max(candidate.options["BLOCK_V"] for candidate in backward.candidates)
    classes = max(1, classes // widest) * widest
    g = padded_buffer(x, n, min(classes, v))

    def to_gradient(config: Config, tile: slice) -> None:
        """Writes the gradient of some classes' logits to g."""
        blocks = -(-(tile.stop - tile.start) // config.BLOCK_V)
        out: _Arguments = {"g": g, "g_stride": g.stride(0), "first": tile.start}
        logits.launch(backward, config, blocks, out | {"class_blocks": blocks})

    first = slice(0, min(classes, v))
    config = logits.config(backward, lambda config: to_gradient(config, first))
    for start in range(0, v, classes):
        tile = slice(start, min(start + classes, v))
        to_gradient(config, tile)
        gradients.add(g[:, : tile.stop - start], tile)
    return gradients.outputs()


class _Gradients:
    """The gradients of x, weight and bias, computed from tiles of the logits' gradient.

    x's gradient is a sum over tiles and stays f32 until the end. The weight's and the bias's are
    complete after their tile and rounded there.
    """

    def __init__(self, inputs: Inputs, spec: Spec, unscale: Tensor | None):
        self._x, self._weight = inputs.x, inputs.weight
        self._factor, self._unscale = render.gradient_factor(spec), unscale
        shapes = {"weight": inputs.weight.shape, "bias": inputs.weight.shape[:1]}
        # tiles overwrite the gradients, if there are rows
        new = inputs.weight.new_empty if len(inputs.x) else inputs.weight.new_zeros
        bias = inputs.weight if inputs.bias is None else inputs.bias
        dtypes = {"weight": inputs.weight.dtype, "bias": bias.dtype}
        grads = (k for k in shapes if k in spec.gradients)
        self._grads = {k: new(shapes[k], dtype=dtypes[k]) for k in grads}
        if "x" in spec.gradients:
            self._grads["x"] = new(inputs.x.shape, dtype=torch.float32)

    def add(self, g: Tensor, classes: slice) -> None:
        """Adds one tile; ``g`` ``[N, classes]`` is the scaled gradient of some classes' logits."""
        grads, weight = self._grads, self._weight[classes]
        if "x" in grads:
            for some in class_tiles(g, g.shape[1]):
                # The first tile overwrites. For one row, whose classes are one tile, addmm of older
                # releases of torch may read an f32 sum as 16 bits.
                add = classes.start + some.start > 0
                product(grads["x"], g[:, some], weight[some], self._factor, add)
        if "bias" in grads:
            total = g.sum(0, dtype=torch.float32).mul_(self._factor)
            grads["bias"][classes] = total if self._unscale is None else total.mul_(self._unscale)
        if "weight" in grads:
            self._round_product(grads["weight"][classes], g.t())

    def _round_product(self, out: Tensor, g: Tensor) -> None:
        """``out = factor * unscale * g @ x``, rounded once to the dtype of ``out``.

        A GPU accumulates 16-bit products in f32 and multiplies by alpha before it rounds, so one
        GEMM is enough. ``unscale`` is a tensor on the device, which alpha cannot be, so it needs an
        f32 tile and one more pass over it. CPUs need the f32 tile too, because they round partial
        sums of 16-bit products.
        """
        if self._unscale is None and (out.is_cuda or out.dtype == torch.float32):
            torch.addmm(out, g, self._x, beta=0, alpha=self._factor, out=out)
            return
        step = max(1, _F32_BYTES // (4 * max(1, out.shape[1])))
        for start in range(0, len(out), step):
            some = slice(start, start + step)
            exact = torch.empty_like(out[some], dtype=torch.float32)
            product(exact, g[some], self._x, self._factor, add=False)
            out[some] = exact if self._unscale is None else exact.mul_(self._unscale)

    def outputs(self) -> Results:
        x = self._grads.get("x")
        if x is not None:
            x = (x if self._unscale is None else x.mul_(self._unscale)).to(self._x.dtype)
        return Results(None, None, x, self._grads.get("weight"), self._grads.get("bias"))


# ---------------------------------------------------------------- kernels


class _Logits:
    """The launches of a run, and the arguments that its kernels share."""

    def __init__(self, inputs: Inputs, spec: Spec):
        self.inputs = inputs
        launches = call.for_call(spec, Operands.of(inputs), call.gpu_of(inputs.x.device))
        self.launches = {launch.stage: launch for launch in launches}
        x, weight, bias = inputs.x, inputs.weight, inputs.bias
        if not x.is_cuda:
            # the interpreter multiplies bf16 wrongly
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        # Always contiguous and aligned, as the rows are that remain where ignored rows are left
        # out: with and without them, the same compiled kernels run.
        self.x = x if x.is_contiguous() and call.aligned(x) else x.clone(memory_format=_CONTIGUOUS)
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        n, d = x.shape
        self.arguments: _Arguments = {
            "x_stride": d,
            "weight_stride": self.weight.stride(0),
            "N": n,
            "D": d,
            "V": weight.shape[0],
            **_beside(inputs),
        }
        if bias is not None:
            self.arguments["bias"] = bias.contiguous()

    def config(self, launch: Launch, run: Callable[[Config], object]) -> Config:
        """The fastest tiles for a launch."""
        n, d, v = (int(self.arguments[size]) for size in ("N", "D", "V"))
        device, dtype = self.x.device, self.x.dtype
        chosen = best(launch, device, dtype, (n, d, v), lambda one: run(Config(**one.options)))
        return Config(**chosen.options)

    def launch(self, launch: Launch, config: Config, others: int, more: _Arguments) -> None:
        """Runs a kernel over all blocks of rows and ``others`` splits or blocks of classes."""
        x, weight = self.x, self.weight
        if launch.described:
            d = x.shape[1]
            x = TensorDescriptor(x, list(x.shape), [d, 1], [config.BLOCK_N, config.BLOCK_D])
            weight = TensorDescriptor.from_tensor(weight, [config.BLOCK_V, config.BLOCK_D])
        programs = -(-len(self.x) // config.BLOCK_N) * others
        candidate = Candidate(launch.kernel, tuple(config._asdict().items()))
        _launch(candidate, programs, self.arguments | more | {"x": x, "weight": weight})


_CONTIGUOUS = torch.contiguous_format


def _beside(inputs: Inputs) -> _Arguments:
    """The arguments beside x, weight and bias."""
    out: _Arguments = {}
    scales = {
        "class_weight": inputs.class_weight,
        "row_scale": inputs.row_scale,
        "lse_scale": inputs.lse_scale,
        "lse": inputs.lse,
        "lse_rest": inputs.lse_rest,
    }
    out |= {k: t.float().contiguous() for k, t in scales.items() if t is not None}
    if inputs.class_weight is not None:
        out["class_mass"] = inputs.class_weight.sum(dtype=torch.float32)
    target = inputs.target
    if target is not None:
        target = target if target.stride(-1) == 1 else target.contiguous()
        out |= {"target": target, "target_stride": target.stride(0)}
    return out


def _launch(candidate: Candidate, programs: int, arguments: _Arguments) -> None:
    """Runs a kernel with the arguments that it has parameters for."""
    function = load(candidate.kernel)
    given = arguments | candidate.options
    named = {name: given[name] for name in function.arg_names}
    launch_options = {k: v for k, v in candidate.options.items() if k.islower()}
    function[(programs,)](**named, **launch_options)
