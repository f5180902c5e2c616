"""What one fused step of a GPU launches, multiplies and allocates, counted without a GPU.

Run by ``test_every_launch.py`` in a process of its own, on tensors without data::

    python -m tests.support.counted_steps
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from fxpass.formula.operands import Operands
from fxpass.formula.reductions import Reductions
from fxpass.kernels import reductions
from fxpass.plan.plan import plan_head
from tests.support.allocations import Allocations
from tests.support.driver import Driver
from tests.support.gpus import H100

LOSS = Reductions((), gradients=("x", "weight"), total=("pick",))
STEPS = {
    "bf16": ((8192, 4096, 128256), LOSS),
    "f32 sums": ((16384, 1024, 151936), replace(LOSS, accumulate="float32")),
    "f32 weight": ((8192, 2048, 128256), replace(LOSS, unrounded=("x", "weight"))),
    "in backward": ((8192, 2048, 128256), Reductions(("pick",), gradients=("x", "weight"))),
}


class Products(Driver):
    """Takes down the products, too: sizes, dtype of the result, and beta."""

    def __init__(self):
        super().__init__(H100)
        self.products: Counter[str] = Counter()

    def __enter__(self) -> Products:
        super().__enter__()
        mm = torch.mm

        def taken(a: Any, b: Any, *, out: Any) -> Any:
            self._note(a, b, out, 0)
            return mm(a, b, out=out)

        self.patch.setattr(torch, "mm", taken)
        return self

    def _addmm(self, add: Any, a: Any, b: Any, *, out: Any, beta: int = 1, **more: Any) -> Any:
        assert (len(a), b.shape[1]) == out.shape
        assert out.dtype in (a.dtype, more.get("out_dtype"))
        assert out is add
        self._note(a, b, out, beta)
        return out

    def _note(self, a: Any, b: Any, out: Any, beta: int) -> None:
        sizes = "x".join(map(str, (*a.shape, b.shape[1])))
        self.products[f"{sizes} {str(out.dtype)[6:]} beta={beta}"] += 1


def count(sizes: tuple[int, int, int], spec: Reductions) -> dict[str, Any]:
    n, d, v = sizes
    with Products() as driver, driver.mode:
        new = torch.empty
        operands = Operands(
            *(new(n, d, dtype=torch.bfloat16), new(v, d, dtype=torch.bfloat16)),
            *(None, None, new(n, dtype=torch.int64), (), new(1, n) if spec.total else None),
        )
        device = torch.device("cuda", 0)
        of_call = n, d, v, torch.bfloat16, device
        found = plan_head(*of_call, spec, scaled=False, backward=bool(spec.total))
        with Allocations() as allocated:
            out, grads = reductions.forward(operands, spec, found)
            if not spec.total:
                found = plan_head(*of_call, spec, scaled=False, backward=True)
                incoming = new(1, n)
                grads = reductions.backward(operands, spec, found, out, incoming)
        return {
            "launches": len(driver.launched),
            "products": dict(driver.products),
            "dtypes": {name: str(t.dtype)[6:] for name, t in grads.items()},
            "MiB": allocated.peak([]) >> 20,
        }


if __name__ == "__main__":
    print(json.dumps({name: count(*step) for name, step in STEPS.items()}))
