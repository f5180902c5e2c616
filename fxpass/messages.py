"""The text of every error, and of every refusal: why a loss, or a function of logits, is not fused.

A refusal follows the name of a call, ``aten.sort at train.py:11 works along rows``, or is a
sentence of its own. Names in braces are filled in. :data:`INSTEAD` has code to write instead for
some, and :func:`instead_of` finds it for a text::

    >>> print(instead_of(RETURNED.format(size="2.0 GiB")))
    loss = model(**batch, labels=labels).loss  # the model computes the loss
    step = torch.compile(step, backend="fusedce")  # or compile what computes it

A text with which the operator ``fxpass::rows`` refuses its arguments stands where it is checked: no
program meets it. So do the reasons of :mod:`fxpass.lower`, which finds no formula: such a loss is
fused, and a loop runs it.
"""

from __future__ import annotations

import re
from textwrap import indent

# ---------------------------------------------------------------- a loss, or a head, in a graph

ENTERS = (
    "its logits enter the graph as %{name}: the linear is in another graph, or there was a graph "
    "break between them (TORCH_LOGS=graph_breaks tells where)"
)
SPLIT_BY_DDP = (
    "its logits enter the graph as %{name}: DistributedDataParallel's splitting put the linear "
    "into another part; compute each loss right after its head, or set "
    "torch._dynamo.config.optimize_ddp = False"
)
RETURNED = (
    "the graph returns its logits, {size}, with gradients, and has no loss of them: compile the "
    "function that computes the loss, or pass labels to the model"
)
NO_LINEAR = "its logits come from %{name} ({op}), not from a linear"
NOT_OF_LINEAR = "its logits are not computed by a linear"
NO_TENSOR = "%{name} ({call}) is not of a tensor of the graph"
NO_EXAMPLE = "%{name} is not a tensor whose shape and dtype are known"
SEVERAL_WEIGHTS = "its rows have more than one weight, or bias"
NESTED = (
    "it is inside %{name} ({call}); of nested graphs, only those of activation checkpoints and "
    "custom functions are fused"
)
UNKNOWN_READER = "no rule covers the operations that read its logits"
FEW_MIB = "its logits take {size}, fewer than {least:g} MiB (FUSEDCE_MIN_LOGITS_MB=0 fuses all)"
FEW_CLASSES = (
    "rows of {classes} logits take hardly more memory than the other values of a row "
    "(FUSEDCE_MIN_LOGITS_MB=0 fuses all)"
)
MORE_HIDDEN = (
    "rows of {classes} logits take less memory than their {hidden} hidden values "
    "(FUSEDCE_MIN_LOGITS_MB=0 fuses all)"
)

# ---------------------------------------------------------------- a call that ends a region

ALONG_ROWS = "works along rows"
SOFTMAX_ALONG_ROWS = "takes a softmax along rows"
NO_RULE = "has no rule for rows"
RANDOM = "draws random numbers"
LEAVES_GRAPH = "leaves the graph with its classes"
CLASSES_OF_ALL = "reads classes of all rows"
NO_HEAD = "has no head"
COMPARED = "compares logits with a value of all rows, which another pass computes"
OTHER_ROWS = "combines rows with other rows"
NO_ROWS = "has no operand with rows"
READS_ITSELF = "reads itself"
RESULT_WITHOUT_ROWS = "is one of several results that are not of rows"
RESHAPED_ROWS = "reshapes in a way that is not known"
ROWS_AND_CLASSES = "mixes rows and classes in one dimension"
ROWS_MOVED = "moves rows"
ROWS_SPREAD = "spreads rows"
DEVICE_OF_LOGITS = "moves the logits from {before} to {after}; move the labels to {before} instead"
DEVICE_OF_OPERAND = "moves a large operand between devices"
REDUCES_ALL = "reduces all dimensions"
SUMS_ROWS = "sums rows of no classes"
INDEX_OF_OTHER_ROWS = "has an index of other rows"
INDEX_OF_OPERAND = "indexes an operand in a way that is not known"
INDEX_OF_ROWS = "indexes rows of an operand"
INDEX_OF_LOGITS = "indexes in a way that is not known"
MASK_OF_LOGITS = "is indexed by a mask in a way that is not known"
JOINED = "joins rows of several tensors"
JOINED_OTHERS = "joins tensors of other rows"
PADS_ROWS = "pads rows"
PART_MOVED = "writes rows to the places of other rows"
PART_OF_OTHERS = "is a part of other rows"
PART_SPLIT = "splits rows of an operand that is read with them"
PART_FROM_NUMBER = "starts at a number of the program"
PLACE_FROM_NUMBER = "takes a row or a class by a number of the program"
BATCHED_PRODUCT = "is a batched product in a way that is not known"
PRODUCT_OF_ROWS = "is a product of different rows"
PRODUCT_OF_OTHERS = "is a product of other rows"
PRODUCT_NO_HEAD = "is a product that is no head"
PRODUCT_SCALED = "scales a product"
MATRIX_EACH_ROW = "multiplies each row by a matrix of its own"
COLLECTIVE_SIZES = "is a collective, and sizes of the head may differ between ranks"
COLLECTIVE_GROUP = "is a collective of a group with another kind of name"
COLLECTIVE_ENTRIES = "is a collective of entries along rows"
COLLECTIVE_ROWS = "is a collective along rows"
SIZE = "has the size {size}"
OPERAND_ROWS = "is an operand whose rows are not those of its reader"
OTHER_DTYPE = "is {made} in rows, and {wanted} in the graph"
CIRCLE = "would have to run before and after one call"

# ---------------------------------------------------------------- a function of deferred logits

NOT_FUSED = "is not fused"
NOT_FUSED_BECAUSE = "is not fused: {why}"
NOT_COMPILED = "is not compiled ({error}: {text})"
FAILS_ON_FAKES = "fails on fake tensors ({error}: {text})"
ASKS_VALUES = "asks for values"
NO_LOGITS = "reads no logits"
FEW_ROWS = "reads few rows"
SOME_AS_LARGE = "returns some tensors as large as logits, and others that are not"
BITS = "reads the bits of {before} as {after}"
SHAPE_OF_VALUES = "makes a tensor whose shape depends on values"
WRITES = "writes to its arguments"
WRITES_AND_RETURNS = "writes to its arguments, and returns others"
WRITES_OF_MODEL = "writes to logits of a model, or of which there are views"
WRITES_WITHOUT_GRADIENTS = "writes to logits where gradients are off"
ALREADY_COMPUTED = "reads logits that are computed"
NO_RECORD = "reads logits without a record of how they were made"
WERE_DROPPED = "reads logits that were dropped"
GRADIENT_SEEN = "reads logits whose gradient the program reads"
HISTORY_CHANGED = "reads a tensor whose history was changed"
BEFORE_STEP = "reads logits of before a step, or of a weight that was replaced"
NUMBER_VARIES = "has a number that differs from call to call"
SIZES_VARY = "has sizes that differ from call to call"
MODE = "runs in a mode of torch, or in a transform of torch.func"
READS_TYPE = "reads a {kind}"
ARGUMENT_TYPE = "has an argument of type {kind}"
SLICE_OF_TENSORS = "has an argument that is a slice of tensors"
SKIPPED_FRAME = (
    "its logits are deferred: each function that reduces them is a program, called from eager code"
)

# ---------------------------------------------------------------- errors of deferred logits

STALE = (
    "the logits of `{source}` were deferred, and one of their inputs, a {dtype} tensor of shape "
    "{shape}, {what} before they were used. Use the logits, or make a copy of them "
    "(logits.detach().clone()), before {before}; or have them computed with the loss "
    '(FUSEDCE_LOGITS=keep, or options={{"fusedce.logits": "keep"}})'
)
FREED = "was freed"
CHANGED = "was changed in place"
CHANGED_DATA = "was changed in place (through .data)"
COMPUTES_LOGITS = (
    "{line} computes the logits {logits} of `{source}`, which were deferred{why}. Read them "
    "in the compiled function, beside the loss; or have them computed there (FUSEDCE_LOGITS=keep)"
)
GRADIENT_LATE = (
    "{what}, after functions of these logits were computed without them: their gradients go to "
    "hidden states and weight, not through the logits. Call retain_grad() on the logits before "
    "that; or have them computed with the loss (FUSEDCE_LOGITS=keep)"
)
SECOND_BACKWARD = (
    "Trying to backward through the graph a second time: the tensors that the gradients of logits "
    "need were freed. Specify retain_graph=True"
)
DROPPED = (
    "the logits of `{source}` were never computed, because FUSEDCE_LOGITS=drop; with "
    "FUSEDCE_LOGITS=defer they are computed when they are used"
)
DATA_ASSIGNED = (
    "deferred logits do not take `.data = other`; write with .copy_(other), or have the logits "
    "computed with the loss (FUSEDCE_LOGITS=keep)"
)
SHAPE_CHANGED = (
    "{function} changes the shape of deferred logits in place; work on logits.detach().clone(), or "
    "have the logits computed with the loss (FUSEDCE_LOGITS=keep)"
)

# ---------------------------------------------------------------- errors of settings and of dtypes

MIXED_DTYPES = (
    "operands of {dtypes} meet outside autocast in {call}: cast one of them, put the call under "
    "torch.autocast, or let fxpass cast with FUSEDCE_MIXED_DTYPES=cast"
)
HALF_MEETS_BFLOAT16 = (
    "float16 meets bfloat16 in {call}: computed in float32. A weight was probably read with the "
    "wrong dtype, and then its values are wrong too: check how it was loaded"
)
BACKEND_NAME = 'the backend of the package fxpass is named "fusedce": backend="fusedce"'
UNKNOWN_SETTING = "unknown {kind} {key!r}{meant} fxpass has {names}"
SETTING_VALUE = "{key}={value!r} is not allowed; use {allowed}"
NO_SUCH_OPTION = "{inner} has no option {key!r}: did you mean {names}?"
NO_COMPILER = (
    "Inductor needs a C++ compiler for code on the CPU and found none: install g++ or clang (for "
    "example apt-get install g++), name yours in CXX, or choose another inner backend with "
    "FUSEDCE_INNER=aot_eager"
)

# ---------------------------------------------------------------- errors of the functions

TEMPERATURE = "temperature must be a positive number, got {value}"
REDUCTION = "reduction must be one of {names}; got {value!r}"
LABEL_SMOOTHING = "label_smoothing must be in [0, 1], got {value}"
IGNORE_INDEX = "ignore_index must fit into int64, got {value}"
TARGET_GRADIENT = "the target or the class weights requires a gradient: detach them"
CLASS_RANGE = "class {index} is out of bounds: there are {classes} classes"
COMPILED_FOR_ALL = (
    "{name}: the compiled code depends on the rank's classes; set "
    "torch.distributed.config.compile_on_one_rank = False"
)
PLACEMENTS = (
    "{name}: linear_weight has the placements {placements}; it has to be sharded over its classes, "
    "Shard(0), along one dimension of its mesh"
)
NO_GROUP = "{name} needs a process group: call torch.distributed.init_process_group, or pass one"
SHARD_SIZE = (
    "{name}: rank {rank} of {ranks} has {count} of {classes} classes, and should have {due}: "
    "classes are divided as by torch.chunk. If the number of all classes is not this rank's number "
    "times the number of ranks, pass classes="
)
ALL_CLASSES = "{name}: {operand} has {count} of {classes} classes; each rank needs all of them"
SEQUENCE_DIM = "{name}: a DTensor has its own placements; leave out sequence_dim"
SAME_ROWS = (
    "{name} needs input [..., D] and target [...] or [..., V] of the same rows, got {input}{ranks} "
    "and {target}"
)

# ---------------------------------------------------------------- errors of the command line

TARGET_FORM = "{target!r} is not of the form FILE:FUNCTION"
NO_FILE = "there is no file {path}"
NO_PYTHON = "{path} is not a Python file"
NO_FUNCTION = "{path} has no function {name}"
INPUTS_TYPE = "{name}_inputs() has to return a tuple or a dict, not {kind}"
INPUTS_MISSING = (
    "{name}: {error}: define {name}_inputs() that returns them (see fxpass explain --help)"
)
WHOLE_NUMBER = "{text!r} is not a whole number from {least} on"

# ---------------------------------------------------------------- what torch says

# Of a graph that breaks at a mask.
MASK_BREAK = "`aten.nonzero.default`'s output shape depends on"

# The code to write instead, two lines each, of what users meet most.
INSTEAD = {
    ENTERS: (
        'step = torch.compile(step, backend="fusedce")  # the function with both head and loss\n'
        'model.compile(backend="fusedce")  # or the model: its logits are deferred'
    ),
    RETURNED: (
        "loss = model(**batch, labels=labels).loss  # the model computes the loss\n"
        'step = torch.compile(step, backend="fusedce")  # or compile what computes it'
    ),
    WRITES_OF_MODEL: (
        "logits = logits.masked_fill(mask, -math.inf)  # a new tensor, in place of a write\n"
        "loss = F.cross_entropy(logits, labels)"
    ),
    MASK_BREAK: (
        "labels = labels.masked_fill(~mask, -100)  # all rows, of which some are ignored\n"
        "loss = F.cross_entropy(logits, labels)"
    ),
}


def with_code(line: str, before: str = "") -> str:
    """A line and, below it, the code to write instead, if it has a refusal for which there is some.

    Args:
        line: of a report or a log.
        before: what the lines of code begin with.
    """
    code = instead_of(line)
    return (
        line
        if code is None
        else f"{line}\n{indent('instead:', before)}\n{indent(code, before + '  ')}"
    )


def instead_of(line: str) -> str | None:
    """The code to write instead of what the refusal in a line names."""
    return next((code for refusal, code in INSTEAD.items() if fixed(refusal) in line), None)


def fixed(refusal: str) -> str:
    """The longest part of a text without a name in braces."""
    return max(re.split(r"\{.*?\}", refusal), key=len)
