"""The function of a chunk of rows that computes outputs of a slice, and its inputs.

In: row outputs of a slice. Out: the inputs (:class:`fxpass.capture.values.Leaf`): logits of heads,
operands with rows, operands that all rows share; and a function of them in the canonical layout,
``[n, ...]``. Autograd may run through it: a call that the program makes without gradients is made
without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxpass.capture.values import Arg, Chain, Leaf, Size, Stop, Value, key_of
from fxpass.capture.virtual import filled
from fxpass.graph.nodes import hint

# Rows of the example inputs; no other size is likely to be equal.
ROWS = 13


class Environment:
    """What the rules of a slice's calls run in.

    Attributes:
        n: the number of rows.
        device: of the logits.
        grad: whether gradients are enabled, apart from calls that the program makes without.
        chain: the views of rows that are taken of what a rule computes.
    """

    def __init__(
        self, leaf: Callable[[Leaf], Tensor], n: Any, device: torch.device, size: Any
    ) -> None:
        self.n, self.device = n, device
        self.grad = torch.is_grad_enabled()
        self.chain: Chain = ()
        self._leaf, self._size = leaf, size
        self._known: dict[Any, Any] = {}

    def of(self, arg: Arg) -> Tensor:
        """An argument: ``[n, ...]``; ``[1, ...]`` or a scalar if all rows share it."""
        chain = self.chain if arg.then is None else (arg.then, *self.chain)
        return self.value(arg.value, arg.letters, chain)

    def full(self, arg: Arg) -> Tensor:
        """An argument with all rows."""
        found = self.of(arg)
        return found.expand(self.n, *found.shape[1:]) if found.dim() else found.expand(self.n)

    def sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Sizes of the program as those of this run."""
        return [self._size(s) if isinstance(s, torch.SymInt) else s for s in sizes]

    def each(self, values: Sequence[Value], chain: Chain | None = None) -> Iterator[Tensor]:
        """Tensors with tags, of the rows of a chain, or else of those of the rule that runs."""
        chain = self.chain if chain is None else chain
        return (self.value(value, "", chain) for value in values)

    def set(self, value: Value, chain: Chain, tensor: Tensor) -> None:
        """Gives a tensor with a tag, which no call of the record makes."""
        self._known[id(value), "", key_of(chain)] = tensor

    def value(self, value: Value, letters: str, chain: Chain) -> Tensor:
        """A tensor of the slice, of which a chain of views of rows is taken."""
        key = id(value), letters if value.tag is None else "", key_of(chain)
        if key in self._known:
            return self._known[key]
        if value.tag is None or value.step is None:
            found = self._operand(value, value.tag or letters, chain)
        elif value.step is not None and value.step.head is not None:
            leaf = Leaf("logits", chain, value.step.head, key=f"{id(value)}{key_of(chain)}")
            found = self._leaf(leaf)
            found = found[:, None] if value.tag[0] == "k" else found
        else:
            found = self._run(value, chain)
        self._known[key] = found
        return found

    def _operand(self, value: Value, letters: str, chain: Chain) -> Tensor:
        if (found := filled(self, value, letters, chain)) is not None:
            return found
        has_rows = "r" in letters or any(op.kind == "broadcast" and op.before == 0 for op in chain)
        kind = "row" if has_rows else "shared"
        chain = chain if has_rows else ()
        key = f"{id(value)}{letters}{key_of(chain)}"
        found = self._leaf(Leaf(kind, chain, None, value, letters, key))
        return found[None] if kind == "shared" and found.dim() else found

    def _run(self, value: Value, chain: Chain) -> Tensor:
        step, outer = value.step, self.chain
        assert step is not None
        run: Any = step.run
        one = hasattr(run, "args")  # results that are views of different rows
        key = id(step), key_of(chain), value.index if one else -1
        if key not in self._known:
            self.chain = chain
            try:
                # not as in the call that reads it: what it computes, others read as well
                with torch.set_grad_enabled(step.grad and self.grad):
                    made = run(self, value.index) if one else run(self)
                if self.grad and not step.grad:  # said in a trace of these calls, too
                    made = pytree.tree_map_only(Tensor, Tensor.detach, made)
                self._known[key] = made
            finally:
                self.chain = outer
        found = self._known[key]
        several = isinstance(found, tuple | list)
        return found[value.index] if several else found


def leaves_of(outputs: Sequence[Value], device: torch.device) -> list[Leaf]:
    """The inputs of the function that computes some outputs: logits, rows, shared operands.

    Raises:
        Stop: a call fails on a chunk of rows.
    """
    found: dict[str, tuple[Leaf, Tensor]] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def leaf(wanted: Leaf) -> Tensor:
        if wanted.key not in found:
            sizes = [ROWS if s == "n" else hint(s) for s in shape_of(wanted)]
            with mode:
                made = torch.empty(sizes, dtype=dtype_of(wanted), device=device)
            found[wanted.key] = wanted, made
        return found[wanted.key][1]

    with mode, torch.no_grad():
        environment = Environment(leaf, ROWS, device, hint)
        for output in outputs:
            try:
                made = environment.value(output, "", ())
            except Stop:
                raise
            except Exception as error:
                where = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                raise Stop(f"fails on a chunk of rows ({where})") from error
            _check(made, output)
    every = [leaf for leaf, _ in found.values()]
    return sorted(every, key=lambda leaf: ("logits", "row", "shared").index(leaf.kind))


def _check(made: Tensor, output: Value) -> None:
    """A rule has to give what the program has, but for the rows."""
    assert output.tag is not None
    letters = zip(output.shape, output.tag, strict=True)
    wanted = [ROWS, *(hint(s) for s, letter in letters if letter != "r")]
    if list(made.shape) != wanted or made.dtype != output.fake.dtype:
        got = f"{list(made.shape)} {made.dtype} for {wanted} {output.fake.dtype}"
        raise Stop(f"has another shape on a chunk of rows: {got}")


def shape_of(leaf: Leaf) -> tuple[Size | str, ...]:
    """The shape of an input; ``n`` for its rows."""
    if leaf.head is not None:
        return "n", leaf.head.classes
    assert leaf.value is not None
    if leaf.kind == "shared":
        return leaf.value.shape
    sizes = zip(leaf.value.shape, leaf.letters, strict=True)
    return "n", *(s for s, letter in sizes if letter != "r")


def dtype_of(leaf: Leaf) -> torch.dtype:
    """The dtype of an input."""
    value = leaf.head.x if leaf.head is not None else leaf.value
    assert value is not None
    return value.fake.dtype


def function_of(leaves: Sequence[Leaf], outputs: Sequence[Value]) -> Callable[..., list[Tensor]]:
    """A function of the inputs, in their order, to the outputs ``[n, ...]``."""

    def function(*tensors: Tensor) -> list[Tensor]:
        known = dict(zip((leaf.key for leaf in leaves), tensors, strict=True))
        sizes: dict[str, Any] = {}
        for leaf, tensor in zip(leaves, tensors, strict=True):
            for symbol, now in zip(shape_of(leaf), tensor.shape, strict=True):
                if isinstance(symbol, torch.SymInt):
                    sizes.setdefault(str(symbol.node.expr), now)

        def size(wanted: torch.SymInt) -> Any:
            expr = wanted.node.expr
            if str(expr) in sizes:
                return sizes[str(expr)]
            known = {s: sizes[str(s)] for s in expr.free_symbols if str(s) in sizes}
            if len(known) < len(expr.free_symbols):
                raise Stop(f"the size {wanted} is that of no operand")
            return sympy_interp(PythonReferenceAnalysis, known, expr)

        n = tensors[0].shape[0]
        found = Environment(lambda leaf: known[leaf.key], n, tensors[0].device, size)
        return [found.value(output, "", ()) for output in outputs]

    return function


def trained(leaf: Leaf) -> bool:
    """Whether an input needs a gradient."""
    if leaf.head is not None:
        return leaf.head.trained
    return leaf.value is not None and leaf.value.trained
