"""``fxpass demo`` and ``fxpass doctor``.

Only the command line imports it, and the benchmarks use its training and its measure of memory.
Imports ``op``, ``plan`` and the public modules.
"""
