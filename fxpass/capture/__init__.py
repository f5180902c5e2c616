"""Reads what a graph does to rows of logits: row regions, by the class of each ATen operation.

Knows no formula and no spelling, only which operations keep rows apart. It never edits a graph.
Imports ``graph``, ``spec`` and ``plan``.
"""
