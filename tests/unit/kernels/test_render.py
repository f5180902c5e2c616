"""The text of two kernels, one of each direction; and that what nothing reads may be left out."""

from __future__ import annotations

import random

from expecttest import assert_expected_inline

from fxpass.kernels.render import reductions_kernel
from fxpass.kernels.template import without_unread
from tests.support.specs import spec_of

HEAD = "@jit\ndef f(\n    x,\n    y,\n):\n"


def body(text: str, forward: bool = True) -> str:
    """From the kernel's first line on; its parameters are what launches bind."""
    kernel = reductions_kernel(spec_of(text), forward)
    return kernel.source.partition("\n):\n")[2]


def test_a_policy_s_loss():
    """Log-probabilities and entropies with known weights, in one launch."""
    assert_expected_inline(
        body("outputs=moment(1,1);pick gradients=x total=moment(1,1);pick"),
        """\
    row = tl.program_id(0).to(tl.int64)
    N = N.to(tl.int64)
    logits += row * stride
    c = tl.load(picks + row).to(tl.int32)
    z_c = tl.load(logits + c).to(tl.float32)
    # a kernel without a first pass has no other barrier
    tl.debug_barrier()

    # the largest logit so far: m is finite, sums are those under m
    lowest = tl.full((LANES,), -3.4028234663852886e38, tl.float32)
    m = lowest
    zeros = tl.full((LANES,), 0.0, tl.float32)
    s10 = zeros
    s11 = zeros
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = cols < V
        z = tl.load(logits + cols, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        z = in_lanes(z, LANES, VECTOR)
        top = tl.max(tl.max(z, 2), 0)
        higher = tl.maximum(m, top)
        decay = tl.exp2(1.4426950408889634 * (m - higher))
        shift = tl.maximum(m - higher, -1000000000000000.0)
        y = z - higher[None, :, None]
        e = tl.exp2(1.4426950408889634 * y)
        near = tl.maximum(y, -1000000000000000.0)
        s11 = decay * (s10 * shift + s11) + tl.sum(tl.sum(e * near, 2), 0)
        s10 = decay * s10 + tl.sum(tl.sum(e, 2), 0)
        m = higher
    # of all lanes
    higher = tl.max(m, 0)
    decay = tl.exp2(1.4426950408889634 * (m - higher))
    shift = tl.maximum(m - higher, -1000000000000000.0)
    s11 = tl.sum(decay * (s10 * shift + s11), 0)
    s10 = tl.sum(decay * s10, 0)
    m = higher
    log_s = tl.log(s10)

    inverse = 1.0 / s10
    m11 = inverse * (-log_s * s10 + s11)
    tl.store(outputs + 0 * N + row, m11)
    tl.store(outputs + 1 * N + row, z_c - m - log_s)

    # fp16 gradients would lose what is below 6e-8, hence the factor
    d_m11 = 1024.0 * tl.load(incoming + 0 * N + row)
    d_pick = 1024.0 * tl.load(incoming + 1 * N + row)
    c11 = d_m11
    c10 = -d_m11 * m11 - d_pick
    for later in range(0, V, BLOCK_V):
        start = (V - 1) // BLOCK_V * BLOCK_V - later
        cols = start + tl.arange(0, BLOCK_V)
        inside = cols < V
        z = tl.load(logits + cols, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        l = z - m - log_s
        p = tl.exp2(1.4426950408889634 * l)
        l = tl.maximum(l, -1000000000000000.0)
        g = p * (c10 + c11 * l)
        if (start <= c) & (c < start + BLOCK_V):
            g += tl.where(cols == c, d_pick, 0.0)
        tl.store(logits + cols, g, mask=inside, eviction_policy="evict_first")
""",
    )


def test_backward_of_log_probabilities():
    assert_expected_inline(
        body("outputs=pick gradients=x", forward=False),
        """\
    row = tl.program_id(0).to(tl.int64)
    N = N.to(tl.int64)
    logits += row * stride
    c = tl.load(picks + row).to(tl.int32) - slice_start
    # a kernel without a first pass has no other barrier
    tl.debug_barrier()

    # in place of the maximum and the logarithm of the sum: the lse and its rounding error
    m = tl.load(lse + row)
    log_s = tl.load(rest + row)

    # fp16 gradients would lose what is below 6e-8, hence the factor
    d_pick = 1024.0 * tl.load(incoming + 0 * N + row)
    c10 = -d_pick
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = cols < V
        z = tl.load(logits + cols, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        l = z - m - log_s
        p = tl.exp2(1.4426950408889634 * l)
        g = c10 * p
        if (start <= c) & (c < start + BLOCK_V):
            g += tl.where(cols == c, d_pick, 0.0)
        tl.store(logits + cols, g, mask=inside, eviction_policy="evict_first")
""",
    )


# ---------------------------------------------------------------- what nothing reads

NAMES = "abcdxy"


def body_of(chosen: random.Random, depth: int = 0, loops: int = 0) -> list[str]:
    """Random statements, in so many loops."""
    lines = []
    for _ in range(chosen.randint(1, 5)):
        one, two, three = chosen.choices(NAMES, k=3)
        kind = chosen.random()
        if kind < 0.45 or depth == 3:
            lines.append(f"{one} {chosen.choice(['=', '+='])} {two} + {three} % 7")
        elif kind < 0.6:
            counted = [f"i{i}" for i in range(loops)]
            lines.append(f"store({chosen.choice([one, *counted])})")
        elif kind < 0.7:
            lines.append(f"{one}, {two} = {three}, {one} + 1")
        else:
            looped = kind < 0.85
            head = f"for i{loops} in range({two} % 3):" if looped else f"if {two} % 2:"
            lines += [head, *(f"    {x}" for x in body_of(chosen, depth + 1, loops + looped))]
    return lines


def stored(module: str) -> list[int]:
    found: list[int] = []
    names = {"jit": lambda f: f, "store": found.append}
    exec(module, names)
    f = names["f"]
    parameters = f.__code__.co_varnames[: f.__code__.co_argcount]
    f(**{name: {"x": 3, "y": 5}[name] for name in parameters})
    return found


def test_random_programs_store_the_same():
    chosen, shorter = random.Random(0), 0
    start = [f"{name} = {i}" for i, name in enumerate("abcd")]
    for _ in range(400):
        lines = [*start, *body_of(chosen), f"store({chosen.choice(NAMES)})"]
        module = HEAD + "".join(f"    {line}\n" for line in lines)
        less = without_unread(module)
        shorter += len(less) < len(module)
        assert stored(less) == stored(module), module
    assert shorter > 300
