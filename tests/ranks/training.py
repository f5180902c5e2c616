"""What ranks train with FSDP2 (``fully_shard``) and DistributedDataParallel: the losses of some steps,
the first gradients and the last logits, against one process on the batches of all ranks.

FSDP2, seen in torch 2.13: its hooks are functions that Dynamo must not trace, and every module that
was given to ``fully_shard`` has one before and one after its ``forward``. So the graph breaks at
each such module, in whatever way and order it is compiled:

- The hooks of the root stand outside of its ``forward`` and cost nothing. Inside of it the graph
  breaks at the call that leads to the sharded blocks (``self.body(...)``; ``self.model(...)`` in
  transformers), and what comes after, head and loss, is one graph. The root's weights enter it as
  plain tensors: gathered, and in the dtype of the mixed precision policy.
- A head in a group of its own has hooks between itself and the loss: two graphs, not fused. A
  module that holds the head *and* computes the loss may have a group of its own.
- Where the loop over sharded blocks stands in the same function as head and loss, Dynamo gives the
  whole function up ("graph break in a for/while loop"), which then runs in eager, for any backend.

DDP: ``torch.compile(DDP(model))`` and ``DDP(torch.compile(model))`` give the backend the same graphs.
With ``torch._dynamo.config.optimize_ddp`` (the default) each graph is cut where one of DDP's buckets
of gradients is full, so that communication starts before backward ends. The cuts are found from the
loss upward, and the head is the first that has a large weight: the cut is before its linear, and head
and loss are in one part. They are not where another large weight is used in between, as by a second
head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxpass import messages
from tests.ranks.case import Case, Found, Rank, Values, as_in_one_process, same, whole
from tests.ranks.networks import (
    Network,
    OneFrame,
    UnusedParameter,
    WithHeadAndLoss,
    batches,
    in_the_next_part,
    large,
    of_two_heads,
    sorted_loss,
    squared_lse,
)
from tests.support import tiny

RATE = 1.0
FREED = "was freed before they were used"


def outputs(returned: Any) -> tuple[Tensor, Tensor]:
    """Loss and logits, of a network's tuple or of what transformers return."""
    return returned if isinstance(returned, tuple) else (returned.loss, returned.logits)


def read(logits: Tensor) -> Tensor | str:
    """The values, or the error."""
    try:
        return logits.clone().detach()  # what keeps rows apart computes nothing
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def train(
    call: Callable[..., Any],
    parameters: dict[str, nn.Parameter],
    given: list[Tensor],
    *,
    parts: int = 1,
    sync: Callable[[bool], Any] = lambda last: nullcontext(),
    more: Callable[[Tensor], Tensor] | None = None,
    late: bool = False,
    facts: dict[str, Any] | None = None,
) -> Values:
    """Trains along the plain gradient.

    Args:
        call: the model, compiled or not.
        parts: of how many batches the gradients are summed.
        sync: entered for each part: told whether it is the last.
        more: a further loss, of the logits.
        late: whether the last logits are read after the optimizer's step instead of before
            ``backward``.
        facts: ``kind`` of the logits, and the ``error`` when they were read.
    """
    values: Values = {}
    logits, of_parts = torch.empty(0), []
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for step, ids in enumerate(given):
        total, of_parts = torch.zeros((), dtype=torch.float64), []
        for k, part in enumerate(ids.chunk(parts)):
            with sync(k == parts - 1):
                loss, logits = outputs(call(input_ids=part, labels=part))
                loss = loss if more is None else loss + more(logits)
                last = step == len(given) - 1
                of_parts.append(logits if late or not last else read(logits))
                (loss / parts).backward()
            total += loss.detach().cpu() / parts
        values[f"loss {step}"] = total
        if not step:
            values |= {
                n: zeros(p) if p.grad is None else whole(p.grad).clone()
                for n, p in parameters.items()
            }
        optimizer.step()
        optimizer.zero_grad()
    found: list[Any] = [read(part) if late else part for part in of_parts]
    facts = {} if facts is None else facts
    facts |= {"kind": type(logits).__name__, "error": ""}
    if isinstance(found[0], str):
        facts["error"] = found[0]
    else:
        values["logits"] = torch.cat(found)
    return values


def zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape)


def joined(name: str, parts: list[Tensor]) -> Tensor:
    """The mean loss of batches that differ, the logits of all of them; gradients are the same."""
    if name.startswith("loss"):
        assert len({float(part) for part in parts}) == len(parts), "all ranks have the same data"
        return torch.stack(parts).mean()
    return torch.cat(parts) if name == "logits" else same(name, parts)


@dataclass(frozen=True, kw_only=True)
class Course:
    """A model to train.

    Attributes:
        model: with the same weights at every call.
        ddp: the arguments of DDP; without, it is FSDP that is used.
        shard: given the model, a mesh and ``policy``.
        how: it is compiled ``after`` it is wrapped or ``before``, or by its method ``compile``.
        autocast: to bfloat16.
        parts, more: see :func:`train`.
        longer: by how much sequences grow at each step, which makes shapes dynamic.
        split: ``optimize_ddp``.
        lost: whether the logits are not to be had any more.
    """

    model: Callable[[], nn.Module] = Network
    ddp: dict[str, Any] | None = None
    shard: Callable[[Any, DeviceMesh, MixedPrecisionPolicy], None]
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009, it is frozen
    how: str = "after"
    autocast: bool = False
    parts: int = 1
    more: Callable[[Tensor], Tensor] | None = None
    longer: int = 0
    split: bool = True
    lost: bool = False

    def step(self, here: Rank) -> Values:
        model: Any = self.model().to(here.device)
        given = here.move(batches(range(here.rank, here.rank + 1), self.longer))
        call = here.compile(model) if self.how == "before" else model
        if self.ddp is None:
            self.shard(model, here.mesh(), self.policy)
        else:
            ids = [here.rank] if here.device.type == "cuda" else None
            call = DistributedDataParallel(call, device_ids=ids, bucket_cap_mb=1, **self.ddp)
        wrapped = call
        if self.how != "before":
            call = here.compile(call, method=self.how == "method")

        def run(**batch: Tensor) -> Any:
            with torch.autocast(here.device.type, torch.bfloat16, enabled=self.autocast):
                return call(**batch)

        def sync(last: bool) -> Any:
            if self.ddp is not None:
                return nullcontext() if last else wrapped.no_sync()
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            return nullcontext()

        options: dict[str, Any] = {"parts": self.parts, "sync": sync, "more": self.more}
        options |= {"late": self.ddp is not None, "facts": here.facts}
        with torch._dynamo.config.patch(optimize_ddp=self.split):
            return train(run, parameters_of(model), given, **options)

    def case(self, world: int = 2, inner: str = "aot_eager", **more: Any) -> Case:
        def alone(dtype: torch.dtype) -> Values:
            model = self.model().to(dtype)
            given = batches(range(world), self.longer)
            values = train(model, parameters_of(model), given, more=self.more)
            if self.lost:
                del values["logits"]
            return values

        low = self.autocast or self.policy.param_dtype is not None
        facts = {"matched": 1, "rejected": 0, "casts": 0}
        facts |= {"kind": "DeferredLogits"} | more.pop("facts", {})
        return Case(
            step=self.step,
            world=world,
            alone=alone,
            dtype=torch.bfloat16 if low else torch.float32,
            ways=("eager", "fused") if low else ("fused",),
            options={"fusedce.inner": inner},
            facts=facts,
            join=joined,
            **more,
        )


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """As they are now: FSDP replaces parameters, and checkpointing renames them."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
    }


def blocks_and_root(model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """The usual way. The root's group holds the embedding and the head."""
    inside = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
    for block in model.model.layers if hasattr(model, "model") else model.body.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inside)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def head_apart(model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """The head has a group of its own; its weight is freed after its ``forward``."""
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    blocks_and_root(model, mesh, policy)


def checkpointed(model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """The blocks' forward is computed again in backward, where their weights are gathered again."""
    for name, block in model.body.blocks.named_children():
        model.body.blocks.register_module(name, checkpoint_wrapper(block))
    blocks_and_root(model, mesh, policy)


def identical(case: Case, each: list[Found]) -> None:
    """To the bit, the inner backend's own course."""
    for rank in each:
        ours, theirs = rank.values["fused"], rank.values["aot_eager"]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def switched_off(case: Case) -> Case:
    return replace(
        case,
        ways=("aot_eager", "fused"),
        options={"fusedce.inner": "aot_eager", "fusedce.enabled": "0"},
        facts={},
        check=identical,
    )


def freed(case: Case, each: list[Found]) -> None:
    """The weight is freed with the end of its own forward."""
    for rank in each:
        assert rank.facts["error"].startswith("StaleLogitsError: ")
        assert FREED in rank.facts["error"]
    as_in_one_process(case, each)


def fsdp(inner: str = "aot_eager", world: int = 2, **course: Any) -> Case:
    more = {k: course.pop(k) for k in ("facts", "says", "check") if k in course}
    course = {"shard": blocks_and_root, **course}
    return Course(**course).case(world, inner, **more)


BF16 = torch.bfloat16
BROKEN: dict[str, Any] = {
    "facts": {"matched": 0, "rejected": 1, "kind": "Tensor"},
    "says": (messages.fixed(messages.ENTERS),),
}
FSDP = {
    "mixed": fsdp(policy=MixedPrecisionPolicy(BF16, torch.float32, torch.float32)),
    "autocast": fsdp(autocast=True),
    "tied and accumulated": fsdp(model=lambda: Network(tied=True), how="before", parts=2),
    # of the two losses one is outside
    "checkpointed, loss of logits": fsdp(shard=checkpointed, more=squared_lse, facts={"matched": 2}),
    "head with loss": fsdp(model=WithHeadAndLoss, shard=head_apart, lost=True, check=freed),
    "head apart": fsdp(shard=head_apart, **BROKEN),
    "one frame": fsdp(model=OneFrame, **BROKEN),
    "row region": fsdp(
        model=lambda: Network(loss=sorted_loss), facts={"kind": "Tensor"},
        says=("region of 1 head",),
    ),
    "llama": fsdp("eager", model=tiny.llama, how="method"),
    # of 201, 30 and 62 rows
    "uneven": fsdp(
        world=4, model=lambda: Network(width=30, inner=62),
        policy=MixedPrecisionPolicy(BF16, torch.float32),
    ),
    "switched off": switched_off(fsdp()),
}  # fmt: skip


def ddp(parts: int = 4, matched: int = 1, **course: Any) -> Case:
    """``parts``: graphs that the inner backend got: the embedding, two linears of a block, and the
    head with the loss."""
    more = {k: course.pop(k) for k in ("says",) if k in course}
    plain = course.pop(
        "plain", False
    )  # DDP clones what the model returns to find what was not used
    facts = {"matched": matched, "rejected": course.pop("rejected", 0), "parts": parts}
    facts |= {"kind": "Tensor"} if plain else {}
    course = {"shard": None, "model": large, "ddp": {}, "how": "before", **course}
    course["parts"] = course.pop("summed", 1)
    return Course(**course).case(facts=facts, **more)


DDP = {
    "outside": ddp(2, model=lambda: large(blocks=0), how="after"),
    "one graph": ddp(1, how="after", split=False),
    "static": ddp(ddp={"static_graph": True}),
    "unused": ddp(model=UnusedParameter, ddp={"find_unused_parameters": True}, plain=True),
    "tied and accumulated": ddp(model=lambda: large(tied=True), summed=2),
    "dynamic": ddp(2 * 4, matched=2, longer=1),  # the shapes of the second step are another graph
    "two heads": ddp(
        5, model=lambda: large(loss=of_two_heads, second=(256, 1100)),
        rejected=1, plain=True, says=(messages.fixed(messages.SPLIT_BY_DDP),),
    ),
    # whose product is a head of the next part
    "next part": ddp(
        5, 2, model=lambda: large(loss=in_the_next_part, after=(1100, 256)),
        says=("logits [48, 1100], cross-entropy", "region of 1 head, logits [48, 256]: pow, mean"),
    ),
    "row region": ddp(
        model=lambda: large(loss=sorted_loss), plain=True, says=("region of 1 head",)
    ),
    "switched off": switched_off(ddp()),
}  # fmt: skip
CASES = {
    **{f"FSDP, {name}": case for name, case in FSDP.items()},
    **{f"DDP, {name}": case for name, case in DDP.items()},
}
