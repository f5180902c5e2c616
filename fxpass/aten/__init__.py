"""Class reductions in ATen: the reference of the tests, and the implementation for CPUs.

``reductions`` runs a call; ``blocks`` and ``tiles`` loop over parts of the logits, and ``products``
multiplies for loops of any function of rows. The arithmetic of reductions is in ``row_sums`` and
``slopes``. Imports ``formula`` and ``plan``.
"""
