"""Class reductions in ATen: the reference of the tests, and the implementation for CPUs.

``reductions`` runs a call; ``chunked`` and ``tiles`` loop over parts of the logits, whose
arithmetic is in ``row_sums`` and ``slopes``. Imports ``spec`` and ``plan``.
"""
