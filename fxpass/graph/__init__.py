"""Reads any Dynamo graph: the arguments of calls by name, writes, nested graphs, placements.

Knows nothing of losses, and changes no graph but in ``region.return_once``. Imports nothing of
fxpass.
"""
