"""The fused loss in Triton: generates kernels from a spec, and launches them.

Kernels are templates, which every machine can render; only the launchers ``chunked`` and ``tiled``,
``tuning``, and the kernels that are plain functions import triton. Imports ``spec`` and ``plan``.
"""
