"""From a graph to matches and rejections: tables of spellings, and one reader of each.

A graph is never changed here, and whatever is in no table is declined, with a reason for the user.
Imports ``graph``, ``spec`` and ``plan``.
"""
