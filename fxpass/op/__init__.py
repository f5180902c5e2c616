"""The operator ``fxpass::rows``: a function of rows of logits, a chunk of rows at a time.

Loops with a formula run the implementation that the plan names; Inductor compiles the functions of
others. Imports ``formula``, ``plan``, ``aten``, ``kernels``, ``region`` and ``lower``.
"""
