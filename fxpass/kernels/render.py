"""Renders the Triton kernels of a spec from the templates in ``templates/``.

In: a spec, the optional operands that are present, and the features of a GEMM. Out:
:class:`Kernel`, a name and a whole Python module. Features that the spec does not use leave no text
in it::

    >>> kernel = row(Spec(label_smoothing=0.1), weighted=False)
    >>> "smooth" in kernel.source, "class_weight" in kernel.source, "ignore_index" in kernel.source
    (True, False, True)

A kernel's template says what it computes and what its parameters are. The templates read
:class:`Features` and :class:`Gemm`, and these conventions hold:

- a hole that is alone on its line stands for any number of lines, at its depth;
- a parameter that the body does not name is left out.

The name of a kernel is a hash of the text: it is the same in every process, and specs with the same
text share a kernel. The module does not import triton, so it runs on any platform.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from sympy import Expr

from fxpass.kernels import expression
from fxpass.plan.plan import PADDING
from fxpass.spec.expression import Z, text
from fxpass.spec.reductions import LEAST_LOG
from fxpass.spec.spec import ELSEWHERE, Spec

# Most of a softmax over a vocabulary is below 6e-5, where fp16 loses precision, or below 6e-8, its
# smallest number. Gradients are stored multiplied by GAIN, in every dtype: a power of two changes
# no bits of bf16 and f32. The rest of fp16's range, a factor of 64, is for probabilities whose sum
# exceeds one, row coefficients up to 2, and slopes.
GAIN = 1024.0

# f32's lowest number, the initial maximum. -inf would give exp(-inf - -inf), which is nan.
LOWEST = "-3.4028234663852886e38"


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: the function's name and the module that defines it."""

    name: str
    source: str


class Gemm(NamedTuple):
    """The features of a GEMM that change the text of a kernel.

    Attributes:
        biased: whether a bias is added.
        precision: ``input_precision`` of ``tl.dot`` for f32 operands; empty for 16-bit ones.
        described: whether x and weight are tensor descriptors.
        warp_specialized: whether separate warps load and multiply.
    """

    biased: bool = False
    precision: str = ""
    described: bool = False
    warp_specialized: bool = False


@dataclass(frozen=True)
class Features:
    """The features of a spec and its operands that change the text of a kernel.

    Attributes:
        target, ignore_index, shard_of, transform: as of the spec.
        smoothing: its ``label_smoothing``.
        gradient: whether the kernel computes the gradient of the logits.
        lse: whether the kernel stores the log-sum-exp of each row, also of ignored rows.
        weighted, row_scaled, lse_scaled, biased: whether these operands are present.
        whole_row, padded: see :func:`row`.
    """

    target: str
    ignore_index: int | None
    shard_of: int
    smoothing: float
    transform: Expr
    gradient: bool
    lse: bool
    weighted: bool
    row_scaled: bool = False
    lse_scaled: bool = False
    whole_row: bool = False
    padded: bool = False
    biased: bool = False

    @property
    def indices(self) -> bool:
        return self.target == "indices"

    @property
    def probabilities(self) -> bool:
        return self.target == "probabilities"

    @property
    def dense(self) -> bool:
        """Whether q has more than one entry, so that sum(q * z) runs over the whole row."""
        return self.probabilities or bool(self.smoothing)

    @property
    def varies(self) -> bool:
        """Whether sum(q) over some classes depends on data; otherwise every class weighs one."""
        return self.dense and (self.probabilities or self.weighted)

    @property
    def sharded(self) -> bool:
        """Whether a target class may be in another shard."""
        return self.indices and bool(self.shard_of)

    @property
    def ignores(self) -> bool:
        """Whether rows may be ignored."""
        return self.indices and self.ignore_index is not None

    @property
    def every_row(self) -> bool:
        """Whether ignored rows are computed too."""
        return self.lse or self.lse_scaled

    @property
    def transformed(self) -> bool:
        return self.transform != Z

    @cached_property
    def varying(self) -> bool:
        """Whether the slope of the transform differs from class to class."""
        return self.gradient and not expression.unit_slope(self.transform)[1].is_number

    @property
    def functions(self) -> str:
        """The source of each function that transforms a logit."""
        sources = expression.functions(self.transform, self.gradient) if self.transformed else []
        return "".join(f"{source}\n\n\n" for source in sources)

    @property
    def facts(self) -> str:
        """What the docstring of a generated module says."""
        said = {
            "no target" if self.target == "none" else f"class {self.target}": True,
            f"ignore_index {self.ignore_index}": self.ignores,
            f"a shard of {self.shard_of} classes": self.sharded,
            f"label smoothing {self.smoothing!r}": self.smoothing,
            "class weights": self.weighted,
            "a bias in f32": self.biased,
            f"logits {text(self.transform)}": self.transformed,
            "log-sum-exp of every row": self.lse,
            "gradient of the log-sum-exp": self.lse_scaled,
        }
        return textwrap.fill("; ".join(fact for fact, holds in said.items() if holds), 96)


# ---------------------------------------------------------------- the kernels


@functools.cache
def row(
    spec: Spec,
    weighted: bool,
    row_scaled: bool = False,
    lse_scaled: bool = False,
    whole_row: bool = False,
    padded: bool = False,
    biased: bool = False,
) -> Kernel:
    """``chunked``: losses of rows of logits, and the gradients of the logits if the spec names any.

    The gradients have to be multiplied by :func:`gradient_factor`.

    Args:
        spec: the loss.
        weighted, row_scaled, lse_scaled, biased: whether these operands are present.
        whole_row: whether one block has all classes, so that each logit is read once.
        padded: whether the kernel may overwrite the columns from V to the next multiple of 16.
    """
    gradient = bool(spec.gradients)
    scaled = {"row_scaled": row_scaled and gradient, "lse_scaled": lse_scaled and gradient}
    more = {"whole_row": whole_row, "padded": padded, "biased": biased}
    features = _features(spec, gradient=gradient, lse=spec.lse, weighted=weighted, **scaled, **more)
    return _kernel("row", "", features)


@functools.cache
def forward(spec: Spec, weighted: bool, gemm: Gemm) -> Kernel:
    """``tiled``: partial sums over the logits of each row."""
    return _kernel("tile_forward", "_forward", _of_forward(spec, weighted), gemm)


@functools.cache
def merge(spec: Spec, weighted: bool) -> Kernel:
    """``tiled``: losses and log-sum-exps of the partial sums."""
    return _kernel("merge", "_merge", _of_forward(spec, weighted))


@functools.cache
def mass(spec: Spec, weighted: bool) -> Kernel:
    """``tiled``: the sum of each row's target distribution, for class probabilities."""
    return _kernel("mass", "_mass", _of_forward(spec, weighted))


@functools.cache
def backward(spec: Spec, weighted: bool, row_scaled: bool, lse_scaled: bool, gemm: Gemm) -> Kernel:
    """``tiled``: the gradient of some classes' logits, to be multiplied by
    :func:`gradient_factor`."""
    scaled = {"row_scaled": row_scaled, "lse_scaled": lse_scaled}
    features = _features(spec, gradient=True, lse=False, weighted=weighted, **scaled)
    return _kernel("tile_backward", "_backward", features, gemm)


@functools.cache
def gradient_factor(spec: Spec) -> float:
    """The factor for the kernels' gradients: the constant part of the slope, divided by GAIN."""
    factor, _ = expression.unit_slope(spec.transform)
    return float(factor) / GAIN


def _of_forward(spec: Spec, weighted: bool) -> Features:
    # the lse of every row is stored, ignored rows included: backward needs it
    return _features(spec, gradient=False, lse=True, weighted=weighted)


def _features(spec: Spec, **more: bool) -> Features:
    return Features(
        target=spec.target,
        ignore_index=spec.ignore_index,
        shard_of=spec.shard_of,
        smoothing=spec.label_smoothing,
        transform=spec.transform,
        **more,
    )


# ---------------------------------------------------------------- the templates

_NAME = "kernel_NAME"


def _kernel(template: str, stage: str, features: Features, gemm: Gemm | None = None) -> Kernel:
    return rendered(template, f"linear_cross_entropy{stage}", f=features, gemm=gemm)


def rendered(template: str, name: str, **features: Any) -> Kernel:
    """The kernel of a template, by its file's name; a hash of the text is added to the name."""
    found = _templates().get_template(f"{template}.py.jinja")
    module = _without_unused(found.render(**features, name=_NAME))
    name = f"{name}_{hashlib.sha256(module.encode()).hexdigest()[:8]}"
    return Kernel(name, module.replace(_NAME, name))


def _without_unused(module: str) -> str:
    """The module without the parameters that its kernel's body does not name, in the signature and
    in the lists of names that ``triton.jit`` gets."""
    functions, jit, kernel = module.rpartition("@triton.jit(")
    signature, end, body = kernel.partition("):\n")
    used = set(re.findall(r"\w+", re.sub("#.*", "", body)))

    def named(names: re.Match[str]) -> str:
        kept = [name for name in re.findall(r"\w+", names[0]) if name in used]
        return "[" + ", ".join(f'"{name}"' for name in kept) + "]"

    options, define, *parameters = signature.splitlines(keepends=True)
    parameters = [line for line in parameters if re.findall(r"\w+", line)[0] in used]
    options = re.sub(r"\[.*?\]", named, options)
    return "".join([functions, jit, options, define, *parameters, end, body])


class _WholeLines(Extension):
    """Fills a hole that is alone on its line with whole lines, at the depth of the hole."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        lines = r"{% filter lines('\1') %}{{ \2 }}{% endfilter %}\n"
        return re.sub(r"^( *)\{\{ ([^{}]+) \}\}\n", lines, source, flags=re.M)


def _lines(lines: str, depth: str) -> str:
    return textwrap.indent(lines if not lines or lines.endswith("\n") else f"{lines}\n", depth)


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=[_WholeLines],
        optimized=False,  # a template is compiled in every process, and rendered a few times
    )
    environment.filters["lines"] = _lines
    numbers = {"GAIN": GAIN, "LOWEST": LOWEST, "LEAST_LOG": LEAST_LOG, "LOG2_E": math.log2(math.e)}
    environment.globals.update(numbers, PADDING=PADDING, ELSEWHERE=ELSEWHERE)
    return environment
