"""What is computed, as values: the spec of one fused loss, expressions of a logit, dtypes.

Text round-trips, and nothing is evaluated but expressions, on the tensors they are given. Imports
nothing of fxpass.
"""
