"""Returned logits as a tensor that is computed on first use, with correct values or an error.

If an input of the logits was changed before their first use, the use raises an error. Imports
``formula``, ``op``, ``graph``, ``region`` and ``rows``.
"""
