"""Class reductions in ATen: the reference of the tests, and the implementation for CPUs.

``reductions`` and ``regions`` run a call; ``chunks`` and ``tiles`` loop over parts of the logits.
The arithmetic of reductions is in ``row_sums`` and ``slopes``. Imports ``spec`` and ``plan``.
"""
