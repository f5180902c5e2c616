"""Blocks of inference mode become blocks without gradients.

In: a region. Out: the same region, in which ``torch.no_grad()`` stands for every
``torch.inference_mode()``::

    %mode = _enter_inference_mode(True)    ->    _set_grad_enabled(False)
    %best = argmax(%z, -1)                       %best = argmax(%z, -1)
    _exit_inference_mode(%mode)                  _set_grad_enabled(True)

AOTAutograd cannot trace a view in such a block (pytorch issues 169477 and 180823; up to torch 2.12
not even a linear), and after this error every other graph of the process fails. A compiled graph
returns ordinary tensors in both modes.
"""

from __future__ import annotations

import torch
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from fxpass.graph.modes import modes_of
from fxpass.graph.region import Region


def without_inference_mode(region: Region) -> None:
    """Replaces the blocks of inference mode of a plain region, unless all of it is in that mode."""
    graph = region.module.graph
    entered = graph.find_nodes(op="call_function", target=_enter_inference_mode)
    left = graph.find_nodes(op="call_function", target=_exit_inference_mode)
    modes = modes_of(region) if entered and region.plain else {}
    if not modes or modes[next(iter(graph.nodes))].inference:
        return
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    for node in (*entered, *left, *switches):
        # inference mode has no gradients, whatever is switched on in it
        enabled = modes[node].grad and not modes[node].inference
        with graph.inserting_before(node):
            graph.call_function(torch._C._set_grad_enabled, (enabled,))
    for node in (*left, *entered, *switches):
        graph.erase_node(node)
    region.module.recompile()
