"""The fused loss in Triton: generates kernels from a spec, and launches them.

Only ``chunked``, ``tiled`` and ``tuning`` import triton, so that every machine can generate the
source of a kernel. Imports ``spec``, ``plan``, and from ``aten`` the operands and results.
"""
