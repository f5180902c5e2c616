"""From the ATen graph of a function of rows to a formula of reductions, or no.

What has a formula has generated kernels and tiles. A no is harmless: the function runs as it is.
Imports ``formula``, ``graph`` and ``region``.
"""
