"""Where the pass stands in AOTAutograd: the names of torch that it needs.

In: a Dynamo graph. Out: a compiled function, whose joint graph has the calls. A private backend,
until the reader of Dynamo's graph goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node

from fxpass.rows.chosen import choose_rows
from fxpass.rows.emit import emit
from fxpass.rows.regions import Found, regions
from fxpass.rows.softmaxes import softmaxes
from fxpass.rows.spelling import spell
from fxpass.rows.tags import Stop

log = logging.getLogger(__name__)

CODE = ("rows", "region", "op")  # what decides the graph and its values


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


def rewrite(module: GraphModule, least_mb: float = 0) -> Rewritten:
    """Puts calls into a joint graph, or an inference graph.

    Args:
        module: changed in place, unless everything is declined.
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
            found = regions(attempt, least_mb, first, largest)
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


class RowsPass(CustomGraphPass):
    """The pass for Inductor (``joint_custom_pre_pass``), of training and of inference graphs.

    Args:
        seen: is told what became of each graph.
        least_mb: the size of logits, in MiB, that are worth a loop.
    """

    def __init__(self, seen: Callable[[Rewritten], None], least_mb: float = 0) -> None:
        self.seen, self.least_mb = seen, least_mb

    def __call__(self, graph: Graph) -> None:
        module = graph.owning_module
        if module is not None:
            self.seen(rewrite(module, self.least_mb))

    def uuid(self) -> bytes:
        """Changes with the code and the settings: torch's caches are keyed by it."""
        top = Path(__file__).parents[1]
        files = [file for name in CODE for file in sorted((top / name).glob("*.py"))]
        return get_hash_for_files(tuple(map(str, files)), extra=str(self.least_mb))


def backend(seen: Callable[[Rewritten], None]) -> Any:
    """A backend of ``torch.compile`` that runs the rewritten graphs in eager.

    Args:
        seen: is told what became of each graph.
    """

    def partition(module: GraphModule, inputs: Any, **options: Any) -> Any:
        seen(rewrite(module))
        return min_cut_rematerialization_partition(module, inputs, **options)

    def inference(module: GraphModule, _: Any) -> Any:
        seen(rewrite(module))
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
