"""The computation of a fused loss as values: its spec, the expression of a logit, dtypes.

Specs and expressions have a text form; the text of an expression is parsed back. Only expressions
can be evaluated, on tensors. Imports nothing of fxpass.
"""
