"""From the ATen graph of a function of rows to a formula of reductions, or no.

A function with a formula has generated kernels and tiles. A no is harmless: Inductor compiles it.
Imports ``formula``, ``graph`` and ``region``.
"""
