"""A differential fuzzer: random programs over logits, against eager.

In: a seed. Out: every program that fxpass makes compute something else than eager, reduced to the
statements that matter, and printed as a row of tests/programs::

    python -m tests.fuzz --programs 500 --seed 1
    python -m tests.fuzz --seed 1 --first 137 --programs 1
    python -m tests.fuzz --only outside --programs 200

One grammar writes all of them: :mod:`tests.fuzz.heads` (logits, their views, and what else a program
does), :mod:`tests.fuzz.steps` (from logits to logits) and :mod:`tests.fuzz.reductions` (to rows, and
to a loss). The way in which one runs is drawn too: dtype, autocast, modes, sizes that vary, several
chunks, Triton's interpreter, the inner backend; traced before it is compiled, checkpointed, or with
everything but its heads outside of the compiled function. ``--ranks`` deals the classes of the heads
to two processes. What has failed once, and was mended, is a row of tests/programs/rows/corpus.py.
"""
