"""``fxpass demo`` and ``fxpass doctor``.

Nobody in fxpass imports it but the command line; the benchmarks share its training and its
processes. Imports ``op``, ``plan`` and the public modules.
"""
