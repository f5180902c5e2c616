"""Every function and method of torch: whatever a call writes to, fxpass knows that it may."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, map_arg

from fxpass.graph.calls import written

# What changes the process, or asks for much more than a tensor.
LEFT_OUT = {
    *("compile", "save", "load", "manual_seed", "seed", "wait", "fork", "backward", "set_vital"),
    *("register_hook", "share_memory_", "untyped_storage", "vmap"),
    *(name for name in dir(torch) if name.startswith(("set_", "init_", "use_"))),
    *(name for name in dir(object)),
}


def callables(place):
    for name in sorted(set(dir(place)) - LEFT_OUT):
        found = getattr(place, name)
        if callable(found) and not inspect.isclass(found) and not name.startswith("_reduce"):
            yield found if place is not torch.Tensor else name


def calls(p, q):
    """Arguments by position, as they fit one callee or another."""
    yield from ((p,), (p, q), (p, 1), (p, 0.5), (p, 1, 2), (p, q, q), (p, 0, q), (p, True))
    yield from ((p, 0.5, True, True), (p, -1.0, 1.0, True), (p, 1.0, True), ([p, q],))


KEYWORDS = ({}, {"inplace": True})


@pytest.mark.parametrize("place", [torch, F, torch.special, torch.functional, torch.Tensor])
def test_no_write_goes_unseen(place):
    graph = Graph()
    p, q = graph.placeholder("p"), graph.placeholder("q")
    for node in (p, q):
        node.meta["example_value"] = torch.ones(4, 4)
    missed, ran = [], 0
    for target in callables(place):
        op = "call_method" if place is torch.Tensor else "call_function"
        function = getattr(torch.Tensor, target) if place is torch.Tensor else target
        for args in calls(p, q):
            for kwargs in KEYWORDS:
                node = graph.create_node(op, target, args, kwargs)
                values = {p: torch.rand(4, 4) + 0.1, q: torch.rand(4, 4) + 0.1}
                before = {n: t.clone() for n, t in values.items()}
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        function(*map_arg(args, values.__getitem__), **kwargs)
                except Exception:  # the arguments do not fit
                    continue
                finally:
                    known = written(node)
                    graph.erase_node(node)
                ran += 1
                for n, t in values.items():
                    same = t.shape == before[n].shape and torch.equal(t, before[n])
                    if not same and n not in known:
                        missed.append((target, args, kwargs))
    assert not missed
    assert ran > 5


PURE = [
    *(torch.mm, torch.sort, torch.nonzero, torch.where, torch.cat, torch.stack, torch.einsum),
    *(F.softmax, F.layer_norm, F.dropout, F.embedding, F.scaled_dot_product_attention),
]


@pytest.mark.parametrize("function", PURE)
def test_what_is_pure_is_known_to_be(function):
    graph = Graph()
    p, q = graph.placeholder("p"), graph.placeholder("q")
    for node in (p, q):
        node.meta["example_value"] = torch.ones(4, 4)
    args = {
        **dict.fromkeys((torch.sort, torch.nonzero, F.dropout), (p,)),
        **dict.fromkeys((torch.cat, torch.stack), ([p, q],)),
        **{torch.where: (p, p, q), torch.einsum: ("ij,jk->ik", p, q), F.softmax: (p, -1)},
        **{F.layer_norm: (p, (4,)), F.scaled_dot_product_attention: (p, q, q)},
    }
    assert written(graph.call_function(function, args.get(function, (p, q)))) == []


@pytest.mark.parametrize(
    ("method", "arguments", "options"),
    [
        *(("norm", (), {"dim": 1, "keepdim": True}), ("norm", (), {}), ("norm", (2,), {"dim": 1})),
        *(("split", (2,), {"dim": 1}), ("unflatten", (0, (2, 2)), {})),
    ],
)
def test_methods_of_python_are_pure(method, arguments, options):
    """Their parameters are not those of ATen's schemas."""
    graph = Graph()
    p = graph.placeholder("p")
    p.meta["example_value"] = torch.ones(4, 4)
    assert written(graph.call_method(method, (p, *arguments), options)) == []
