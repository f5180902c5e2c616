"""A row region as text, and as functions of a chunk of rows: its outputs and their gradients.

Knows neither graphs of Dynamo nor operators. Imports ``spec``.
"""
