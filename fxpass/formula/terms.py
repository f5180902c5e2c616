"""The slope of a row's outputs as a sum of terms, whose factors are numbers, tensors or symbols.

In: outputs of :mod:`fxpass.formula.reductions`, their incoming gradients, and the moments that
their slopes read. Out: :class:`Terms`, from which both implementations compute a logit's gradient::

    >>> terms = Terms()
    >>> terms.add_output("pick", 1.0, {})
    >>> terms.coefficients
    {(1, None): {0: -1.0}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpass.formula.outputs import OF_SOFTMAX, TOTAL, Output
from fxpass.formula.reductions import slope_terms


class Terms:
    """The slope of a row's outputs: polynomials of the log-softmax, each multiplied by a power of
    the softmax and by weights.

    Attributes:
        coefficients: the polynomials' coefficients, tensors ``[rows]`` or symbols: by power of the
            softmax and position of the weights, then by power of the log-softmax.
    """

    def __init__(self) -> None:
        self.coefficients: dict[tuple[int, int | None], dict[int, Any]] = {}

    def add(self, a: int, b: int, weight: int | None, factor: Any) -> None:
        """Adds ``factor * w * softmax**a * log_softmax**b``."""
        polynomial = self.coefficients.setdefault((a, weight), {})
        polynomial[b] = polynomial[b] + factor if b in polynomial else factor

    def add_output(self, output: Output, grad: Any, sums: Mapping[Any, Any]) -> None:
        """Adds the slope of an output, without its value at the class of a pick or of the largest
        logit; of a moment ``psi - softmax * sigma``. ``sums`` has the :func:`slope_moments`."""
        if isinstance(output, str):
            if output in OF_SOFTMAX:
                self.add(1, 0, None, grad if output == "lse" else -grad)
        else:
            # a multiple of the softmax, of which psi and sigma have as much, cancels
            psi = [(n, term) for n, term in slope_terms(output) if term != TOTAL]
            for factor, term in psi:
                self.add(term.a, term.b, term.weight, factor * grad)
            for factor, term in psi:
                self.add(1, 0, None, -factor * grad * sums[term])
