"""The operators ``class_reductions`` and ``row_region``: schema, fake tensors, autograd.

They run the implementation that the plan names; the first has a form for a sharded vocabulary.
Imports ``spec``, ``plan``, ``aten``, ``kernels`` and ``region``.
"""
