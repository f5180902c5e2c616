"""Explicit casts in Dynamo's and AOTAutograd's graphs, where autocast leaves mixed dtypes.

Works on graphs with and without a loss. Imports ``graph``, and ``formula.dtypes``, which names and
chooses dtypes.
"""
