"""Whole models whose heads others have sharded: transformers' plans, and FSDP2 on top."""

from __future__ import annotations

import functools

import torch

from tests.ranks.sharding_cases import Model, mean
from tests.ranks.tensor_parallel_cases import batch, ids
from tests.support import ranks, tiny
from tests.support.numerics import assert_close


def gradients(model, loss):
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


@functools.cache
def llama(dtype):
    model = tiny.llama().to(dtype)
    return gradients(model, model(input_ids=ids(), labels=ids()).loss)


def test_llama_under_the_plan_of_transformers(tmp_path):
    """Its plan gathers the logits; with them dropped nothing is gathered any more."""
    tiny.llama().save_pretrained(tmp_path)
    for rank in ranks.run("tests.ranks.tensor_parallel_cases", 2, str(tmp_path)):
        for name in ("defaults", "dropped"):
            run = rank[name]
            assert (run["matched"], run["rejected"]) == (1, 0), run["said"]
            assert "(classes sharded over 2 ranks)" in run["said"][-1]
            assert f"(logits {'kept' if name == 'defaults' else 'dropped'}" in run["said"][-1]
            assert run["gathers"] == (name == "defaults")
            assert run["logits"] == [2, 12, tiny.V]
            values = run["values"]
            assert values.keys() == llama(torch.float32).keys()
            keys = [*values]
            assert_close(
                [values[k] for k in keys],
                *([llama(dtype)[k] for k in keys] for dtype in (torch.float32, torch.float64)),
                torch.float32,
            )
        assert rank["evaluation"]["matched"] == 1, rank["evaluation"]["said"]
        torch.testing.assert_close(rank["evaluation"]["loss"], llama(torch.float32)["loss"])


def test_classes_and_data_along_two_dimensions():
    """FSDP2 over a tensor-parallel head: the mean over both batches, and its gradients."""

    def reference(dtype):
        x, labels = batch()
        model = Model(mean, 13, bias=True).to(dtype)
        return gradients(model, model(x.to(dtype), labels))

    exact, eager = reference(torch.float64), reference(torch.float32)
    for rank in ranks.run("tests.ranks.tensor_parallel_cases", 4):
        assert (rank["matched"], rank["rejected"]) == (1, 0), rank["said"]
        assert "(classes sharded over 2 ranks)" in rank["said"][0]
        values = rank["values"]
        assert_close(*([s[k] for k in exact] for s in (values, eager, exact)), torch.float32)
