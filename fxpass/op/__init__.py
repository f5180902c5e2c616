"""The operator ``fxpass::linear_cross_entropy``: schema, checks, fake tensors, autograd.

It runs the implementation that the plan names, and has a form for a sharded vocabulary. Imports
``spec``, ``plan``, ``aten`` and ``kernels``.
"""
