"""Explicit casts in Dynamo's and AOTAutograd's graphs, where autocast leaves unlike dtypes.

Usable without the fused loss: a graph with no loss is cast as well. Imports ``graph``, and from
``spec`` how dtypes are named and agreed on.
"""
