"""Writes to the local tensor of a DTensor: the rewritten program is eager's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

N, D, V = 8, 6, 10


def classes_masked(x, w, t):
    z = F.linear(x * 1, w)
    with torch.no_grad():
        z.to_local()[:, V - 2 :] = -1e4
    return F.cross_entropy(z, t)


def doubled_without_history(x, w, t):
    z = F.linear(x * 1, w)
    z.detach().to_local().mul_(2)
    return F.cross_entropy(z, t)


def redistributed_to_itself(x, w, t):
    z = F.linear(x * 1, w)
    with torch.no_grad():
        z.redistribute(placements=[Replicate()]).mul_(2)
    return F.cross_entropy(z, t)


def hidden_states_written(x, w, t):
    h = x * 1
    z = F.linear(h, w)
    twice = z * 2
    with torch.no_grad():
        h.to_local().zero_()
    return F.cross_entropy(twice, t) + twice.sum() * 0


def test_writes_to_the_local_tensor_of_a_dtensor(alone):
    """In one process group: with a second one, AOTAutograd itself fails."""
    mesh = init_device_mesh("cpu", (1,))
    x, w, t = torch.randn(N, D), torch.randn(V, D), torch.randint(V - 2, (N,))

    def run(fn):
        given = (DTensor.from_local(one.clone(), mesh, [Replicate()]) for one in (x, w, t))
        x_, w_, t_ = (one.requires_grad_(one.is_floating_point()) for one in given)
        loss = fn(x_, w_, t_)
        loss.backward()
        return [one.full_tensor() for one in (loss, x_.grad, w_.grad)]

    for program in (
        classes_masked,
        doubled_without_history,
        redistributed_to_itself,
        hidden_states_written,
    ):
        options = {"fusedce.inner": "aot_eager"}
        fused = run(torch.compile(program, backend="fusedce", options=options))
        for ours, theirs in zip(fused, run(program), strict=True):
            torch.testing.assert_close(ours, theirs, msg=program.__name__)
