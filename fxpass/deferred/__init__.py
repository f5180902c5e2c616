"""Returned logits as a tensor that is computed on first use: right, or an error.

Changes of what the logits are computed from are seen, and raise. Imports ``spec``, ``op``,
``graph`` and ``match``.
"""
