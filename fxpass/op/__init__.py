"""The operators ``class_reductions`` and ``rows``: schema, fake tensors, autograd of the first.

They run the implementation that the plan names; the first has a form for a sharded vocabulary.
Imports ``spec``, ``plan``, ``aten``, ``kernels`` and ``region``.
"""
