"""The fused loss in Triton: a kernel's text from a spec, and its launch.

Only ``chunked``, ``tiled`` and ``tuning`` import triton, so that a kernel can be read anywhere.
Imports ``spec``, ``plan``, and from ``aten`` the operands and the arithmetic of rows.
"""
