"""The computation of a fused loss as values: its spec, the expression of a logit, dtypes.

Specs and expressions have text forms that round-trip. Only expressions can be evaluated, on
tensors. Imports nothing of fxpass.
"""
