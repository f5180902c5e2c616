"""Whole models whose heads others have sharded: a Llama under transformers' own plan, and a head that
is sharded over classes while FSDP2 shards it over the ranks of rows as well."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from fxpass import messages
from tests.ranks.case import Case, Rank, Values, values_of, whole
from tests.ranks.heads import SHARDED, Model, V, alone, mean
from tests.support import tiny


def ids() -> Tensor:
    """Two sequences that count upward."""
    return torch.tensor([[5], [90]]) + torch.arange(12)


def llama(gathers: bool, logits: str = "", trains: bool = True) -> Case:
    """Its plan gathers the logits, which it returns: nothing is fused. With them dropped nothing is
    gathered any more beside the call."""

    def step(here: Rank) -> Values:
        with tempfile.TemporaryDirectory() as own:
            folder: list[Any] = [own]
            dist.broadcast_object_list(folder)
            tiny.llama().save_pretrained(folder[0])  # the first rank does
            dist.barrier()
            config = DistributedConfig(tp_size=here.world)
            model = LlamaForCausalLM.from_pretrained(folder[0], distributed_config=config)
            dist.barrier()
        given = ids().to(model.device)
        with torch.set_grad_enabled(trains):
            answer = here.compile(model)(input_ids=given, labels=given)
        here.facts["logits"] = list(answer.logits.shape)
        if trains:
            here.backward(answer.loss)
        return values_of(answer.loss, model)

    def in_one(dtype: torch.dtype) -> Values:
        model: Any = tiny.llama().to(dtype)  # type: ignore[arg-type]
        loss = model(input_ids=ids(), labels=ids()).loss
        if trains:
            loss.backward()
        return values_of(loss, model)

    def exchanged(sent: str) -> bool:
        return (f"gather:{whole_logits // 2}" in sent.split()) == gathers

    whole_logits = ids().numel() * tiny.V * 4
    left, dropped = messages.LEAVES_GRAPH, "(logits dropped"
    return Case(
        step=step,
        alone=in_one,
        options={"fusedce.logits": logits} if logits else {},
        facts={"matched": not gathers, "rejected": gathers, "logits": [2, 12, tiny.V]},
        says=(left if gathers else dropped,),
        dumps=() if gathers else ("fxpass.rows(", "_c10d_functional.all_gather_into_tensor"),
        exchanges=exchanged if trains else None,
    )


def two_dimensions(here: Rank) -> Values:
    """Ranks 0, 1 and 2, 3 have one batch each; ranks 0, 2 and 1, 3 have the same classes."""
    mesh = init_device_mesh(here.device.type, (2, 2), mesh_dim_names=("data", "classes"))
    model = Model(mean, bias=True).to(here.device)
    parallelize_module(model, mesh["classes"], {"lm_head": SHARDED})
    fully_shard(model, mesh=mesh["data"])
    x, labels = here.move(t[here.rank // 2 :: 2] for t in batch())
    with loss_parallel():
        loss = here.compile(model, method=True)(x, labels)
        here.backward(loss)
    values = values_of(loss, model)
    total = whole(values["loss"])
    dist.all_reduce(total)
    return values | {"loss": total / here.world}


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randn((4, 6, 8), generator=random), torch.randint(V, (4, 6), generator=random)


CASES = {
    "llama": llama(gathers=True),
    "llama, logits dropped": llama(gathers=False, logits="drop"),
    "llama, evaluated": llama(gathers=True, trains=False),
    "classes and data along two dimensions": Case(
        step=two_dimensions,
        world=4,
        alone=lambda dtype: alone(Model(mean, bias=True), *batch(), dtype),
        facts={"matched": 1, "rejected": 0},
        dumps=("fxpass.rows(", "_c10d_functional.all_reduce"),
    ),
}
