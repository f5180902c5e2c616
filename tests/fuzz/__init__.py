"""A differential fuzzer: random programs, operator specs and uses of deferred logits, against eager.

In: a seed. Out: every program that fxpass makes compute something else than eager, reduced to the
statements that matter and printed so that it runs alone::

    python -m tests.fuzz --programs 500 --seed 1
    python -m tests.fuzz --kind programs --seed 1 --first 137 --programs 1

The programs of the kind ``traced`` are graphs of torch.export or make_fx, and eager is the same graph.
Those of the kind ``sharded`` run on two ranks, which hold half of the classes each. A rank that waits
for the others in vain ends all of them after ``--seconds``.

A program counts as valid when eager runs it, backward included. It fails when fxpass raises where
the inner backend alone does not, or when a value, a gradient, a dtype, a shape, what is left in an
argument, or the state of the random numbers is another one than eager's. Six differences are known
and not fxpass's errors. Eager's gradients may be nan, 0 times infinity, where fxpass has numbers: of
rows that nobody reads, and where a softmax is 0; so may its values be, where the exponential in
log(exp(z)) is infinite. Eager's hardsigmoid has the slope 1/6 of float32 in float64 too. For a linear
of fp16 operands with a bf16 bias, eager raises or returns fp16, depending on the strides of its input,
while Dynamo and Inductor expect f32. AOTAutograd writes once where a foreach function gets the same
tensor twice. Dynamo asserts that the number of rows of a mask is that of what they meet; eager
broadcasts one row, and aot_eager drops the assertion.
"""
