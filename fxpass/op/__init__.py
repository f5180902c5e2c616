"""The operator ``fxpass::linear_cross_entropy``: schema, fake tensors, autograd, what it refuses.

It picks the implementation for a device by the plan, and has a form for classes that are sharded
over ranks. Imports ``spec``, ``plan``, ``aten`` and ``kernels``.
"""
