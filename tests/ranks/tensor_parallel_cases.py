"""What each rank trains for test_tensor_parallel.py: a Llama under transformers' own plan, and a
head that is sharded over classes while FSDP2 shards it over rows' ranks as well."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import fxpass.rewrite.inner
import fxpass.rewrite.transform  # noqa: F401
from tests.ranks.parallel import said_by_fxpass
from tests.ranks.sharding_cases import ColwiseParallel, Model, Shard, mean, result, whole

INNER = {"fusedce.inner": "aot_eager"}


def ids() -> Tensor:
    """Two sequences that count upward."""
    return torch.tensor([[5], [90]]) + torch.arange(12)


def llama(world: int, folder: str) -> dict[str, Any]:
    """A training step, and the loss without gradients, of a Llama that transformers has sharded."""
    config = DistributedConfig(tp_size=world)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    given = ids().to(model.device)
    out: dict[str, Any] = {}
    for name, settings in {"defaults": {}, "dropped": {"fusedce.logits": "drop"}}.items():
        torch._dynamo.reset()
        counters.clear()
        with tempfile.TemporaryDirectory() as dumps, said_by_fxpass() as said:
            options = {**INNER, **settings, "fusedce.dump": dumps}
            run: Any = torch.compile(model, backend="fusedce", options=options)
            answer = run(input_ids=given, labels=given)
            answer.loss.backward()
            graphs = "".join(path.read_text() for path in Path(dumps).rglob("*after*"))
        out[name] = result(answer.loss, model, said)
        out[name]["logits"] = list(answer.logits.shape)
        assert "class_reductions" in graphs
        out[name]["gathers"] = re.search(r"= linear\(.*lm_head", graphs) is not None
        model.zero_grad()
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(model, backend="fusedce", options=INNER)
    with said_by_fxpass() as said, torch.no_grad():
        loss = run(input_ids=given, labels=given).loss
    out["evaluation"] = {
        "loss": whole(loss).cpu(),
        "said": said,
        "matched": counters["fusedce"]["matched"],
    }
    return out


def two_dimensions(rank: int, device: torch.device) -> dict[str, Any]:
    """Ranks 0, 1 and 2, 3 have one batch each; ranks 0, 2 and 1, 3 have the same classes."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "classes"))
    model = Model(mean, 13, bias=True).to(device)
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["classes"], {"lm_head": style})
    fully_shard(model, mesh=mesh["data"])
    x, labels = (t[rank // 2 :: 2].to(device) for t in batch())
    counters.clear()
    with said_by_fxpass() as said, loss_parallel():
        model.compile(backend="fusedce", options=INNER)
        out = model(x, labels)
        out.backward()
    seen = result(out, model, said)
    total = seen["values"]["loss"].to(device)
    dist.all_reduce(total)
    seen["values"]["loss"] = total.cpu() / dist.get_world_size()
    return seen


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randn((4, 6, 8), generator=random), torch.randint(13, (4, 6), generator=random)


def main(rank: int, world: int, device: torch.device, *folder: str) -> dict[str, Any]:
    """``folder`` holds a Llama; without one it is about the mesh of two dimensions."""
    return llama(world, *folder) if folder else two_dimensions(rank, device)
