"""Where the pass stands in AOTAutograd: the names of torch that it needs.

In: a Dynamo graph. Out: a compiled function, whose joint graph has the calls. A private backend,
until the reader of Dynamo's graph goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node

from fxpass.rows.chosen import choose_rows
from fxpass.rows.emit import emit
from fxpass.rows.regions import Found, regions
from fxpass.rows.softmaxes import softmaxes
from fxpass.rows.spelling import spell
from fxpass.rows.tags import Stop

log = logging.getLogger(__name__)


@dataclass
class Rewritten:
    """What became of one graph.

    Attributes:
        found: the regions; None if there was no head.
        calls: how many calls there are.
        declined: why a head is left as it is.
        graph: the joint graph, as it is compiled.
    """

    found: Found | None = None
    calls: int = 0
    declined: list[str] = field(default_factory=list)
    graph: Any = None


def rewrite(module: GraphModule, forward: int | None, least_mb: float = 0) -> Rewritten:
    """Puts calls into a joint graph (or, without ``forward``, an inference graph).

    Args:
        module: changed in place, unless everything is declined.
        forward: the number of the outputs of forward.
        least_mb: the size of logits, in MiB, that are worth a loop.
    """
    result = Rewritten(graph=module)
    module.graph.eliminate_dead_code()
    for first, largest in ((False, False), (False, True), (True, False)):
        attempt = _copied(module)
        try:
            spell(attempt)
            softmaxes(attempt)
            choose_rows(attempt)
            found = regions(attempt, forward, least_mb, first, largest)
            if found is None:
                continue
            why = list(found.declined.values())
            if found.parts and (largest or first or not why):
                emit(attempt, found)
                module.graph = attempt
                module.recompile()
                return Rewritten(found, len(found.parts), why, module)
        except Stop as stop:
            why = [str(stop)]
        except Exception as error:
            log.debug("the pass failed", exc_info=True)
            why = [f"failed: {type(error).__name__}: {error}"]
        result.declined = result.declined or why
    return result


def _copied(module: GraphModule) -> Graph:
    """The graph of a module, to be changed."""
    made = Graph(module)
    copies: dict[Node, Node] = {}
    made.output(made.graph_copy(module.graph, copies))
    return made


def backend(seen: Callable[[Rewritten], None]) -> Any:
    """A backend of ``torch.compile`` that runs the rewritten graphs in eager.

    Args:
        seen: is told what became of each graph.
    """

    def partition(module: GraphModule, inputs: Any, **options: Any) -> Any:
        seen(rewrite(module, options["num_fwd_outputs"]))
        return min_cut_rematerialization_partition(module, inputs, **options)

    def inference(module: GraphModule, _: Any) -> Any:
        seen(rewrite(module, None))
        return make_boxed_func(module)

    def plain(module: GraphModule, _: Any) -> Any:
        return make_boxed_func(module)

    return aot_autograd(
        fw_compiler=plain,
        bw_compiler=plain,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
