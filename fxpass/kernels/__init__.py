"""Class reductions in Triton: generates kernels from a spec, and launches them.

Kernels are a template, which every machine can render; only ``chunked`` and ``reductions``, which
launch them, and the kernels that are plain functions import triton. Imports ``formula`` and
``plan``.
"""
