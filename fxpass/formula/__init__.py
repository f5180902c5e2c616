"""The computation of a fused loss as values: its spec, the expression of a logit, dtypes.

Specs have a text form; that of expressions round-trips. Only expressions can be evaluated, on
tensors. Imports nothing of fxpass.
"""
