"""Reading any Dynamo graph: a call's arguments by name, what writes, nested regions, placements.

Knows nothing of losses and changes nothing. Imports nothing of fxpass.
"""
