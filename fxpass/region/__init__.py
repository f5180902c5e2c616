"""A loop over rows as text, in parts, and as a function of a chunk of rows.

Knows neither graphs of Dynamo nor operators. Imports ``formula``.
"""
