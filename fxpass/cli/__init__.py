"""``fxpass demo`` and ``fxpass doctor``.

Nobody imports it but the command line. Imports ``op``, ``plan`` and the public modules.
"""
