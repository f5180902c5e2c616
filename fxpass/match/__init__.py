"""From a graph to matches and rejections: tables of spellings, and one reader of each.

Changes no graph. A node that is in no table prevents a match, and the rejection gives the user the
reason. Imports ``graph``, ``spec`` and ``plan``.
"""
