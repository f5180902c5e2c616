"""Reads any Dynamo graph: the arguments of calls by name, writes, nested graphs, placements.

Knows nothing of losses, and changes no graph. Imports ``releases``.
"""
