"""What ranks do with FSDP2 (``fully_shard``): courses of training, and logits that outlive weights.

Seen in torch 2.13: FSDP2's hooks are functions that Dynamo must not trace, and every module that
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
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.ranks import parallel
from tests.ranks.parallel import (
    Network,
    next_id_loss,
    outputs,
    relative,
    seeded,
    sorted_next_id_loss,
)
from tests.support import tiny


class HeadAndLoss(nn.Module):
    """Hidden states [B, S, D] to loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(parallel.V, 32) / 32**0.5)

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(hidden, self.weight)
        return next_id_loss(logits, labels), logits


class WithHeadAndLoss(Network):
    """The loss is computed by the module that holds the head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = HeadAndLoss()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head(self.body(input_ids), labels)


class OneFrame(Network):
    """Loop over the blocks, head and loss in one function."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body.embed(input_ids)
        for block in self.body.blocks:
            x = block(x)
        logits = self.lm_head(x)
        return next_id_loss(logits, labels), logits


class RowRegion(Network):
    """Returns values of rows in the place of logits."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return sorted_next_id_loss(self.lm_head(self.body(input_ids)), labels)


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


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        shard: given the model, a mesh and ``policy``.
        how: it is compiled ``after`` fully_shard or ``before``, or by its method ``compile``.
        autocast: to bfloat16.
        parts, more: see :func:`parallel.train`.
        inner: the inner backend.
    """

    name: str
    model: Callable[[], nn.Module] = Network
    shard: Callable[[Any, DeviceMesh, MixedPrecisionPolicy], None] = blocks_and_root
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009, it is frozen
    how: str = "after"
    autocast: bool = False
    parts: int = 1
    more: Callable[[Tensor], Tensor] | None = None
    inner: str = "aot_eager"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast or self.policy.param_dtype else torch.float32


def squared_lse(logits: Tensor) -> Tensor:
    return 0.01 * logits.float().logsumexp(-1).square().mean()


OF_TWO = [
    Case("mixed", policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)),
    Case("autocast", autocast=True),
    Case("tied and accumulated", lambda: Network(tied=True), how="before", parts=2),
    Case("checkpointed, loss of logits", shard=checkpointed, more=squared_lse),
    Case("head with loss", WithHeadAndLoss, shard=head_apart),
    Case("head apart", shard=head_apart),
    Case("one frame", OneFrame),
    Case("row region", RowRegion),
    Case("llama", tiny.llama, how="method", inner="eager"),
]
OF_THREE = [
    Case("uneven", policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
]  # of 201 rows and of 32 and 64


def main(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """What every case became, by name, and what became of logits. The third rank waits for the last
    case, which is the only one for all."""
    results: dict[str, Any] = {}
    pair = DeviceMesh(device.type, [0, 1])
    if rank < 2:
        for case in OF_TWO:
            results[case.name] = trained(case, pair, rank, 2, device)
        results["switched off"] = switched_off(pair, rank, device)
        results["logits"] = Logits(pair, rank, device).outcomes()
    for case in OF_THREE:
        results[case.name] = trained(case, DeviceMesh(device.type, [0, 1, 2]), rank, world, device)
    return results


def course(
    case: Case, mesh: DeviceMesh | None, given: list[Tensor], settings: dict[str, Any] | None
) -> parallel.Course:
    """Trains.

    Args:
        mesh: None for one process without FSDP.
        settings: what torch.compile is given; None for eager.
    """
    device = given[0].device
    call: Any = seeded(case.model).to(device)
    model = call
    compiled = settings is not None
    if compiled and case.how == "before":
        call = torch.compile(model, **settings)
    if mesh is not None:
        case.shard(model, mesh, case.policy)
    if compiled and case.how == "after":
        call = torch.compile(model, **settings)
    if compiled and case.how == "method":
        model.compile(**settings)

    def run(**batch: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
            return call(**batch)

    def sync(last: bool) -> Any:
        if mesh is not None:
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
        return nullcontext()

    return parallel.train(
        run, parameters_of(model), given, parts=case.parts, sync=sync, more=case.more
    )


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """As they are now: FSDP replaces parameters, and checkpointing renames them."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
    }


def fused(inner: str, **options: str) -> dict[str, Any]:
    return {"backend": "fusedce", "options": {"fusedce.inner": inner, **options}}


def trained(
    case: Case, mesh: DeviceMesh, rank: int, world: int, device: torch.device
) -> dict[str, Any]:
    given = parallel.batches(range(rank, rank + 1), device)
    alone = None
    if case.dtype is torch.float32:
        everyone = parallel.batches(range(world), device)
        alone = course(case, None, everyone, None)
    eager = course(case, mesh, given, None)
    return parallel.compare(course(case, mesh, given, fused(case.inner)), eager, alone)


def switched_off(mesh: DeviceMesh, rank: int, device: torch.device) -> bool:
    """Whether the course is the inner backend's own, to the bit."""
    case = Case("switched off")
    given = parallel.batches(range(rank, rank + 1), device)
    off = course(case, mesh, given, fused("aot_eager", **{"fusedce.enabled": "0"}))
    return parallel.identical(off, course(case, mesh, given, {"backend": "aot_eager"}))


class Logits:
    """A model whose logits are used early, late, or by one rank only.

    Each ``when_`` method runs a step and returns what came of it: of values, how far they are off
    from those with the weights of that time; of an error, its text.
    """

    def __init__(self, mesh: DeviceMesh, rank: int, device: torch.device) -> None:
        torch._dynamo.reset()
        self.rank = rank
        self.model: Any = seeded(Network).to(device)
        self.copy = seeded(Network).to(device)
        blocks_and_root(self.model, mesh, MixedPrecisionPolicy())
        self.compiled = torch.compile(self.model, **fused("aot_eager"))
        self.kept = torch.compile(self.model, **fused("aot_eager", **{"fusedce.logits": "keep"}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=parallel.RATE)
        self.ids = parallel.batches(range(rank, rank + 1), device)[0]

    def outcomes(self) -> dict[str, Any]:
        names = [name for name in vars(type(self)) if name.startswith("when_")]
        return {name.removeprefix("when_"): getattr(self, name)() for name in names}

    def right(self) -> Tensor:
        """The logits with the weights of now, by a model without FSDP."""
        whole = {name: p.full_tensor() for name, p in self.model.named_parameters()}
        self.copy.load_state_dict(whole)
        with torch.no_grad():
            return self.copy(self.ids, self.ids)[1].double()

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, logits, and what the logits should be."""
        right = self.right()
        return *outputs(self.compiled(self.ids, self.ids)), right

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def when_one_rank_reads(self) -> Any:
        """The others go on to the collectives of backward."""
        loss, logits, right = self.forward()
        found = off(logits, right) if self.rank == 0 else 0.0
        self.step(loss)
        return found

    def when_after_backward(self) -> Any:
        loss, logits, _ = self.forward()
        loss.backward()
        return off(logits, logits)

    def when_after_the_next_forward(self) -> Any:
        """The weight is the same tensor again, of the same version; its values are new."""
        loss, logits, right = self.forward()
        weight = self.model.lm_head.weight
        version, values = weight._version, weight.detach().clone()
        self.step(loss)
        moved = relative(self.right(), right)
        loss, *_ = self.forward()
        now = self.model.lm_head.weight
        found = off(logits, right)
        gathered = now is weight and now._version == version and not torch.equal(now, values)
        self.step(loss)
        return found, gathered, moved

    def when_gathered_unchanged(self) -> Any:
        """As between the parts of an accumulated gradient: the weight is the right one again."""
        loss, logits, right = self.forward()
        loss.backward()
        self.optimizer.zero_grad()
        loss, *_ = self.forward()
        found = off(logits, right)
        self.step(loss)
        return found

    def when_read_before(self) -> Any:
        """What was read stays; a row that was read stays, the other rows are not to be had."""
        loss, logits, right = self.forward()
        assert isinstance(parallel.read(logits), Tensor)
        self.step(loss)
        loss, rows, right_rows = self.forward()
        last = rows[:, -1]
        assert isinstance(parallel.read(last), Tensor)
        self.step(loss)
        return off(logits, right), off(last, right_rows[:, -1]), off(rows, right_rows)

    def when_not_resharded(self) -> Any:
        """The weight stays after backward, and is cloned before the optimizer's step."""
        self.model.set_reshard_after_backward(False)
        loss, logits, right = self.forward()
        self.step(loss)
        self.model.set_reshard_after_backward(True)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return off(logits, right), relative(self.right(), right)

    def when_kept(self) -> Any:
        right = self.right()
        loss, logits = outputs(self.kept(self.ids, self.ids))
        self.step(loss)
        return off(logits, right)


def off(logits: Tensor, right: Tensor) -> float | str:
    found = parallel.read(logits)
    return found if isinstance(found, str) else relative(found, right)
