"""Which functions of logits keep rows apart, by the class of each ATen operation.

Knows no formula and no spelling. Only ``deferred`` reads it.
Imports ``graph``, ``spec`` and ``plan``.
"""
