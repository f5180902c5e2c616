"""One run of the graph that computes logits: the logits, some of their rows, and gradients.

In: a recipe, a graph that computes logits, and its inputs. Out: plain tensors; each call runs the
recipe::

    run = Run(Recipe(graph, rows=(0,), source="logits = self.lm_head(x)"), (x, weight), False)
    run.logits(rows), run.gradients((True, True), grad)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpass import messages
from fxpass.deferred.inputs import RecordedInput, quiet
from fxpass.formula.dtypes import compute_dtype
from fxpass.rows.tags import Stop

CHUNK = 2**26  # bytes of the logits whose gradients are computed at a time
LAYOUTS = 256  # cached layouts of one recipe; dynamic shapes would add more without end


@dataclass(frozen=True, eq=False)
class Recipe:
    """The computation of logits."""

    graph: GraphModule  # returns the logits; plain torch operations with explicit dtypes
    # Positions of the inputs with rows: their leading dimensions are those of the logits, and a row
    # of the logits depends only on the same row of these inputs. Empty if unknown.
    rows: tuple[int, ...]
    source: str  # the user's source line, for messages
    requires_grad: bool = True  # whether the logits are linked to the inputs by autograd
    # Positions of the hidden states, if the gradients of all other inputs read only these: the
    # linear's output is only cast and viewed. Empty if unknown.
    hidden: tuple[int, ...] = ()
    # Whether the graph reduces no logits, so that the program reads them after forward.
    alone: bool = False
    # Compiles functions of the logits (fxpass.deferred.programs.Programs); None if they are not
    # answered.
    programs: Any = None
    _layouts: dict[Any, tuple[Tensor, torch.device]] = field(default_factory=dict, repr=False)

    def __call__(self, *inputs: Any) -> Tensor:
        """The logits."""
        return self.graph.forward(*inputs)  # the module's own call prints the graph if it raises

    def layout(self, inputs: Sequence[Any]) -> tuple[Tensor, torch.device]:
        """Shape, dtype and strides of the logits as an empty meta tensor, and their device."""
        key = tuple(
            (a.shape, a.stride(), a.dtype, a.device)
            if isinstance(a, Tensor)
            else (float if isinstance(a, float) else a)  # a factor, not a size
            for a in inputs
        )
        found = self._layouts.get(key)  # another thread may clear the cache at any time
        if found is None:
            with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
                out = self(*(stand_in(a) for a in inputs))
            with quiet():
                found = stand_in(out, "meta"), out.device
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = found
        return found


class Run:
    """One run of a compiled graph: the recipe and its inputs.

    Attributes:
        inputs: a :class:`RecordedInput` for each tensor; None if the logits are dropped.
        given: the inputs with their autograd history; none if the logits are dropped.
        trained: whether each input has a gradient.
        answered: whether a function of the logits is linked to these inputs.
        gradient_used: whether the program uses the gradient of the logits, or of a result of them.
        hooks: FSDP's hooks, which wait for a gradient of the logits.
        like, device: the layout of the logits, on the meta device, and their real device.
        lock: guards all values that are computed from these inputs.
    """

    def __init__(self, recipe: Recipe, inputs: Sequence[Any], dropped: bool) -> None:
        self.recipe = recipe
        self.like, self.device = recipe.layout(inputs)
        self.trained = tuple(
            recipe.requires_grad and isinstance(a, Tensor) and a.requires_grad for a in inputs
        )
        self.answered = False
        self.gradient_used = False
        self.hooks: list[Callable[..., Any]] = []
        self.lock = threading.RLock()
        self.inputs: list[Any] | None = None
        self.given: Sequence[Any] = () if dropped else tuple(inputs)
        if not dropped:
            self.inputs = [
                RecordedInput(a, i in recipe.rows) if isinstance(a, Tensor) else a
                for i, a in enumerate(inputs)
            ]

    @property
    def roots(self) -> list[Run]:
        """The run itself; a result of a call has the runs that it is computed from."""
        return [self]

    def linked(self, trained: bool) -> list[Any]:
        """The inputs of a program; if it is trained, with their autograd history.

        Raises:
            Stop: an input with a gradient has other memory now.
            StaleLogitsError: an input was changed.
        """
        found = self.checked()
        for i, needs in enumerate(self.trained):
            if not (trained and needs):
                continue
            if self.given[i].untyped_storage()._cdata != found[i].untyped_storage()._cdata:
                raise Stop(messages.BEFORE_STEP)
            found[i] = self.given[i]
        return found

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """All logits, or the rows with these numbers, ``[*rows.shape, V]``."""
        inputs = self.checked()
        if rows is None:
            return self.recipe(*inputs)
        for i in self.recipe.rows:
            picked = select_rows(inputs[i], rows.flatten())
            inputs[i] = with_dims(picked, inputs[i].dim())
        logits = self.recipe(*inputs)
        return logits.reshape(*rows.shape, logits.shape[-1])

    def gradients(self, needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
        """The gradients of the ``needed`` inputs (None for others), for the logits' ``grad``."""
        wanted = [i for i, need in enumerate(needed) if need]
        found: dict[int, list[Tensor]] = {i: [] for i in wanted}
        read = () if any(needed[i] for i in self.recipe.hidden) else self.recipe.hidden
        # without recomputed logits, backward reads what eager's reads; but FSDP refills memory
        bits = not self.recipe.hidden or is_distributed()
        with quiet():
            inputs = self.checked(read, bits)
            rows = self.recipe.rows
            chunks = self._chunks(inputs, wanted, grad)
            for chunk, chunk_grad in chunks:
                grads = self._chunk_gradients(chunk, wanted, chunk_grad)
                for i, new in zip(wanted, grads, strict=True):
                    if new is None:
                        continue
                    if len(chunks) == 1 or i in rows:
                        found[i].append(new)
                    elif found[i]:
                        found[i][0].add_(new)
                    else:
                        found[i].append(new.to(compute_dtype(new.dtype)))
            joined = {
                i: (torch.cat(t, -2).view_as(inputs[i]) if len(t) > 1 else t[0]).to(inputs[i].dtype)
                for i, t in found.items()
                if t
            }
        return [joined.get(i) for i in range(len(needed))]

    def _chunk_gradients(
        self, inputs: list[Any], wanted: Sequence[int], grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of some inputs, from recomputed logits and their gradient."""
        for i in wanted:
            inputs[i] = inputs[i].detach().requires_grad_()
        with torch.enable_grad(), _UncomputedProducts() if self.recipe.hidden else nullcontext():
            logits = self.recipe(*inputs)
        leaves = [inputs[i] for i in wanted]
        return torch.autograd.grad(logits, leaves, grad.view_as(logits), allow_unused=True)

    def _chunks(
        self, inputs: list[Any], wanted: Sequence[int], grad: Tensor
    ) -> list[tuple[list[Any], Tensor]]:
        """Chunks of the rows of the inputs and of the logits' gradient: autograd saves several
        copies of logits. One chunk has all rows, if backward reads no logits, or if accumulators
        of gradients would take more memory than chunks save."""
        rows = self.recipe.rows
        v = grad.shape[-1]
        accumulators = sum(
            inputs[i].numel() * (inputs[i].itemsize + compute_dtype(inputs[i].dtype).itemsize)
            for i in wanted
            if i not in rows
        )
        if (
            self.recipe.hidden
            or not rows
            or not grad.is_contiguous()
            or grad.nbytes <= max(accumulators, 2 * CHUNK)
        ):
            return [(inputs, grad)]
        step = max(1, CHUNK // (v * grad.itemsize))
        flat = {i: inputs[i].reshape(-1, inputs[i].shape[-1]).split(step) for i in rows}
        chunks = []
        for k, chunk_grad in enumerate(grad.view(-1, v).split(step)):
            sliced = {i: with_dims(slices[k], inputs[i].dim()) for i, slices in flat.items()}
            chunks.append(([sliced.get(i, a) for i, a in enumerate(inputs)], chunk_grad))
        return chunks

    def checked(self, read: tuple[int, ...] = (), bits: bool = True) -> list[Any]:
        """The values of the inputs; raises RuntimeError if they changed or were dropped. If
        positions to ``read`` are given, all other inputs may have changed. Without ``bits``, only
        version counters are compared."""
        source = self.recipe.source
        if self.inputs is None:
            raise RuntimeError(messages.DROPPED.format(source=source))
        with self.lock:
            return [
                a.checked(source, not read or i in read, bits)
                if isinstance(a, RecordedInput)
                else a
                for i, a in enumerate(self.inputs)
            ]


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _UncomputedProducts(TorchDispatchMode):
    """Autograd records products, and casts and views of them, which are not computed: backward
    reads none of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.uncomputed: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        memory = {t.untyped_storage()._cdata for t in self.uncomputed}
        of_product = any(t.untyped_storage()._cdata in memory for t in given)
        if not of_product and func.overloadpacket not in _PRODUCTS:
            return func(*args, **kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            return func(*args, **kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True):
            like = func(*pytree.tree_map(stand_in, args), **kwargs)
        out = torch.empty((), dtype=like.dtype, device=given[0].device).expand(like.shape)
        self.uncomputed.append(out)
        return out


_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "linear")}


def stand_in(a: Any, device: str | None = None) -> Any:
    """An empty tensor with the layout of ``a``; a value that is no tensor is returned unchanged."""
    if not isinstance(a, Tensor):
        return a
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device or a.device)


def select_rows(t: Tensor, rows: Tensor) -> Tensor:
    """The rows of ``t`` ``[..., D]`` with these numbers, ``[*rows.shape, D]``."""
    return t[torch.unravel_index(rows, t.shape[:-1])]


def with_dims(rows: Tensor, dims: int) -> Tensor:
    """Rows ``[R, D]`` as ``[1, ..., R, D]``: an einsum expects the dimensions of all rows."""
    return rows.view(*[1] * (dims - 2), *rows.shape)
