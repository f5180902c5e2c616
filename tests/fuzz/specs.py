"""Random specs of the operator: the program that each stands for, and the operator's call.

In: a seed. Out: a :class:`Case` whose body is plain PyTorch and whose fused function calls
``fxpass.op`` with random options, in one of the implementations.
"""

from __future__ import annotations

import random

from fxpass.spec import expression
from tests.support.losses import GRADIENTS, Spec

from . import afterwards
from .case import Case, Statement

SIZES = {"n": (0, 1, 2, 5, 13, 13, 29, 29), "d": (1, 3, 8, 8), "v": (1, 2, 5, 17, 37)}
DTYPES = (*("", ".bfloat16()") * 2, ".bfloat16()", ".half()", ".double()")
# What casts f32 leaves, as autocast does.
CASTS = (".bfloat16()", ".bfloat16()", ".half()")
# A tied weight, which is an embedding too, and another user of the weight.
TIED = "x = x + w[torch.arange(len(x)) % len(w)]"
USED = "loss = loss + w.float().square().mean()"

# A transform of the logits, as the spec says it and as PyTorch does.
TRANSFORMS = (
    ("30*tanh(z/30)", "30 * torch.tanh(z / 30)"),
    ("2*tanh(z)", "2 * torch.tanh(z)"),
    ("0.0625*z", "0.0625 * z"),
    ("-z", "-z"),
    ("z/3+1", "z / 3 + 1"),
    ("z**2/4", "z**2 / 4"),
    ("0.125*z**3", "0.125 * z**3"),
    ("sigmoid(z)", "torch.sigmoid(z)"),
    ("softplus(z)", "F.softplus(z, threshold=1e9)"),
    ("erf(z)", "torch.erf(z)"),
    ("abs(z)", "z.abs()"),
    ("sin(z)", "torch.sin(z)"),
    ("cos(z)", "torch.cos(z)"),
    ("atan(z)", "torch.atan(z)"),
    ("asinh(z)", "torch.asinh(z)"),
    ("sinh(z/4)", "torch.sinh(z / 4)"),
    ("cosh(z/4)", "torch.cosh(z / 4)"),
    ("exp(z/4)", "torch.exp(z / 4)"),
    ("exp2(z/4)", "torch.exp2(z / 4)"),
    ("expm1(z/4)", "torch.expm1(z / 4)"),
    ("log(z**2+1)", "torch.log(z**2 + 1)"),
    ("log1p(z**2)", "torch.log1p(z**2)"),
    ("sqrt(z**2+1)", "torch.sqrt(z**2 + 1)"),
    ("1/(z**2+1)", "1 / (z**2 + 1)"),
    ("maximum(z,-0.5)", "z.clamp_min(-0.5)"),
    ("minimum(maximum(z,-1),1)", "z.clamp(-1, 1)"),
    ("where(z<=0,0,z)", "F.relu(z)"),
    ("where(z>0,z,0.01*z)", "F.leaky_relu(z)"),
    ("z*sigmoid(z)", "F.silu(z)"),
    ("z*tanh(softplus(z))", "F.mish(z)"),
)


def spec(seed: str) -> Case:
    """One spec with its operands."""
    rng = random.Random(seed)
    n, d, v = (rng.choice(sizes) for sizes in SIZES.values())
    dtype, bias = rng.choice(DTYPES), rng.random() < 0.5
    cast = rng.choice(CASTS) if not dtype and rng.random() < 0.6 else ""
    target = rng.choice(("indices", "indices", "probabilities"))
    named = tuple(g for g in GRADIENTS if rng.random() < 0.7 and (bias or g != "bias"))
    transforms = rng.sample(TRANSFORMS, rng.choice((0, 0, 1, 1, 2)))
    logits = expression.Z
    for text, _ in transforms:
        logits = expression.parse(text).subs(expression.Z, logits)
    weighted = rng.random() < 0.3
    ignore_index = rng.choice((-100, -100, 0, None)) if target == "indices" else -100
    chosen = Spec(
        reduction=rng.choice(("none", "mean", "sum")),
        target=target,
        ignore_index=ignore_index,
        label_smoothing=rng.choice((0.0, 0.0, 0.1, 1.0)),
        transform=expression.parse(expression.text(logits)),
        gradients=named,
        strategy=rng.choice(("chunked", "chunked", "tiled")),
        memory_mb=rng.choice((0, 0, 1)),
        accumulate=rng.choice(("auto", "auto", "auto", "float32")),
    )
    # autocast may find one of the two in 16 bits already
    casts = {name: cast if rng.random() < 0.8 else "" for name in ("x", "weight")}
    dtypes = {name: "" if cast == casts[name] else cast for name in casts}
    holes = {"n": n, "d": d, "v": v}
    x, w, b = (
        _operand(rng, name, rows, columns, named).format(
            dtype=dtype or dtypes.get(name, cast), **holes
        )
        for name, rows, columns in (("x", "n", "d"), ("weight", "v", "d"), ("bias", "v", ""))
    )
    inputs = [
        ("x", x),
        ("w", w),
        ("b", b if bias else "None"),
        ("t", _target(rng, chosen, n, v)),
        (
            "cw",
            _class_weight(rng, chosen, v) if weighted else "None",
        ),
    ]
    operands = f"x{casts['x']}, w{casts['weight']}, b"
    kept = f"F.linear({operands}).detach()" if rng.random() < 0.2 else "None"
    outputs = ("loss",)
    options = chosen.options()
    transform = f"transform=parse({expression.text(options.pop('transform'))!r})"
    wide = {"x": "wide_x=x", "weight": "wide_weight=w"}
    unrounded = [text for name, text in wide.items() if casts[name] and name in named]
    named = [transform, *unrounded, *(f"{name}={option!r}" for name, option in options.items())]
    call = f"loss = fused_loss({operands}, t, cw, {kept}, {', '.join(named)})"
    trains = chosen.gradients
    before = [TIED] * (dtypes["x"] == dtypes["weight"] and "x" in trains and rng.random() < 0.2)
    after = [USED] * (rng.random() < 0.2)
    meaning = _meaning(chosen, operands, [torch for _, torch in transforms], dtype)
    return Case(
        tuple(inputs),
        tuple(map(Statement, (*before, *meaning, *after))),
        outputs,
        _session(rng, outputs, bool(trains)),
        ("x", "w", *(["b"] if bias else []), *outputs),
        seed=rng.randrange(1000),
        fused=tuple(map(Statement, (*before, call, *after))),
        fixed=True,
        # the gradients of one class are 0, or what is left of logits that two kernels round
        implementation=rng.choice(("", "triton", "triton")) if v > 1 else "",
        small=v > 1 and rng.random() < 0.7,
    )


def _operand(rng: random.Random, name: str, rows: str, columns: str, named: tuple[str, ...]) -> str:
    """An operand of random strides."""
    shape = f"{{{rows}}}, {{{columns}}}" if columns else f"{{{rows}}}"
    forms = [f"torch.randn({shape})"] * 3
    if columns:
        forms += [
            f"torch.randn({{{columns}}}, {{{rows}}}).T",
            f"torch.randn({{{rows}}}, 2, {{{columns}}})[:, 1]",
        ]
    form = rng.choice(forms)
    return f"{form}{{dtype}}" + (".requires_grad_()" if name in named else "")


def _target(rng: random.Random, spec: Spec, n: int, v: int) -> str:
    if spec.target == "probabilities":
        one = f"torch.eye({v})[torch.randint({v}, ({n},))]"
        sums_to_zero, of_any_sum = f"{one} - {one}", f"4 * torch.randn({n}, {v})"
        return rng.choice((f"torch.randn({n}, {v}).softmax(1)", sums_to_zero, of_any_sum))
    labels = f"torch.randint({v}, ({n},))"
    if spec.ignore_index == -100 and n:
        share = rng.choice(("0.0", "0.3", "0.3", "2.0"))
        return f"{labels}.masked_fill(torch.rand({n}) < {share}, -100)"
    return rng.choice((labels, f"torch.randint({v}, ({n}, 2))[:, 0]"))


def _class_weight(rng: random.Random, spec: Spec, v: int) -> str:
    forms = [f"torch.rand({v})", f"torch.rand({2 * v})[::2]"]
    if spec.reduction != "mean":  # which divides by their sum
        forms += [f"torch.randn({v})", f"torch.eye({v})[0] - torch.eye({v})[-1]"]
    return rng.choice(forms)


def _meaning(spec: Spec, operands: str, transforms: list[str], dtype: str) -> list[str]:
    cast = "" if dtype == ".double()" else ".float()"
    body = [f"z = F.linear({operands}){cast}", *(f"z = {text}" for text in transforms)]
    if spec.ignore_index is not None and spec.target == "indices":
        ignored = f", ignore_index={spec.ignore_index}"
    else:
        ignored = ", ignore_index=-1" if spec.target == "indices" else ""
    target = "t.to(z.dtype)" if spec.target == "probabilities" else "t"
    return [
        *body,
        f"loss = F.cross_entropy(z, {target}, None if cw is None else cw.to(z.dtype){ignored}, "
        f"reduction={spec.reduction!r}, label_smoothing={spec.label_smoothing})",
    ]


def _session(rng: random.Random, outputs: tuple[str, ...], trains: bool) -> tuple[Statement, ...]:
    names = ", ".join(outputs) + "," * (len(outputs) == 1)
    out, call = ["x, w, b, t, cw = inputs()"], f"{names} = program(x, w, b, t, cw)"
    for _ in range(1 + trains * (rng.random() < 0.2)):  # a second call accumulates gradients
        out += [call, *(afterwards.passes(rng, outputs) if trains else ())]
    return tuple(map(Statement, out))
