"""Where the pass stands in AOTAutograd: the names of torch that it needs.

In: a joint graph, or an inference graph. Out: the same graph with the calls, and what became of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.fx.traceback import preserve_node_meta

from fxpass.graph.names import name_of
from fxpass.graph.text import graph_text
from fxpass.plan.worth import too_small
from fxpass.rows.alike import mark
from fxpass.rows.chosen import choose_rows
from fxpass.rows.collectives import gathers
from fxpass.rows.comparisons import check_passes
from fxpass.rows.emit import emit
from fxpass.rows.heads import PRODUCTS, may_have_heads, products
from fxpass.rows.outer import own_outputs
from fxpass.rows.reasons import Declined, FoundHead, FusedPart, declined, fused_part
from fxpass.rows.regions import Found, regions
from fxpass.rows.rules import A
from fxpass.rows.sizes import numel, packet, shape, value
from fxpass.rows.softmaxes import softmaxes
from fxpass.rows.spelling import spell
from fxpass.rows.stacks import unstack
from fxpass.rows.tags import Stop

log = logging.getLogger(__name__)

# Attempts: whether parts of rows are heads of their own, whether only products with the most rows
# are heads, whether classes come first. The first two count if they decline nothing.
_ONCE = (False, False, False)
_PARTS = (True, False, False)
_LARGEST = (False, True, False)
_FIRST = (False, False, True)
# what decides the graph and its values
CODE = ("rows", "region", "lower", "formula", "op", "aten", "kernels", "plan")


@dataclass
class Rewritten:
    """The outcome of one graph.

    Attributes:
        found: the regions; None if no head became calls.
        calls: how many calls there are.
        heads: the heads whose logits do not exist any more, in the order of the graph.
        declined: why other heads are left as they are.
        graph: the joint graph, as it is compiled.
        text: of the graph with the calls.
        parts: the calls, each with the names of its heads.
        names: of Dynamo's nodes of which something is in a region.
    """

    found: Found | None = None
    calls: int = 0
    heads: list[FoundHead] = field(default_factory=list)
    parts: list[FusedPart] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    declined: list[Declined] = field(default_factory=list)
    graph: Any = None
    text: str = ""


def rewrite(
    module: GraphModule, least_mb: float = 0, strategy: str = "auto", **options: Any
) -> Rewritten:
    """Puts calls into a joint graph, or an inference graph.

    Args:
        module: changed in place, unless everything is declined.
        least_mb: the size of logits, in MiB, that are worth a loop.
        strategy: as of :func:`fxpass.rows.regions.regions`.
        options: ``memory_mb``, ``compiled`` and ``accumulate`` of the loops.
    """
    result = Rewritten(graph=module)
    module.graph.eliminate_dead_code()
    if not may_have_heads(module.graph, least_mb):
        return result
    for parts, largest, first in (_ONCE, _PARTS, _LARGEST, _FIRST):
        attempt = _copied(module)
        try:
            spell(attempt)
            softmaxes(attempt)
            unstack(attempt, products(attempt, least_mb))
            gathers(attempt, products(attempt, least_mb))
            chosen = choose_rows(attempt, products(attempt, least_mb), parts)
            if parts and not chosen:
                continue
            found = regions(attempt, least_mb, first, largest, strategy)
            if found is None:
                continue
            check_passes(found.rules, found.inside)
            if costs := _too_small(found, least_mb):
                log.debug("%s", costs)
                return result
            why = [declined(head, stop, found.later) for head, stop in found.declined.items()]
            if found.parts and (largest or first or not why):
                made = _emitted(attempt, found, options)
                own_outputs(attempt, module.graph)
                module.graph = attempt
                module.recompile()
                made.graph = module
                made.declined = why
                made.text = graph_text(module)
                return made
        except Stop as stop:
            why = [declined(None, stop)]
        except Exception as error:
            log.debug("the pass failed", exc_info=True)
            why = [Declined("", "", f"failed: {type(error).__name__}: {error}")]
        result.declined = result.declined or why
    return result


def _too_small(found: Found, least_mb: float) -> str | None:
    """Why the heads of regions are not worth a loop."""
    heads = [head for head in found.heads if head.node in found.inside]
    if not heads:
        return None
    taken = sum(numel(shape(head.node)) * value(head.node).itemsize for head in heads)
    hidden = heads[0].hidden if len(heads) == 1 else 0
    return too_small(taken, sum(head.classes for head in heads), hidden, least_mb)


def _emitted(graph: Graph, found: Found, options: Mapping[str, Any]) -> Rewritten:
    """Puts the calls into a graph, and says what they are."""
    names = {name for node in found.inside if (name := name_of(node))}
    body = [{h.node for h in found.heads if h.node in part.body} for part in found.parts]
    late = [not found.later.isdisjoint(part.results) for part in found.parts]
    known = found.factor is not None
    calls = emit(graph, found, options)
    read = set(graph.nodes)
    parts = [
        fused_part(call, heads, backward and not known, backward and known)
        for call, heads, backward in zip(calls, body, late, strict=True)
        if call in read
    ]
    return Rewritten(found, len(parts), found.kept, parts, names)


def _copied(module: GraphModule) -> Graph:
    """The graph of a module, to be changed."""
    made = Graph(module)
    copies: dict[Node, Node] = {}
    made.output(made.graph_copy(module.graph, copies))
    return made


class UnfusedError(Exception):
    """Products whose logits must not exist are no heads. Raised while AOTAutograd compiles, so that
    no cache has the code."""


class RowsPass:
    """The pass, of training and of inference graphs.

    Args:
        least_mb, strategy, options: as of :func:`rewrite`.
        needed: the names of the products of Dynamo's graph whose logits must not exist.

    Attributes:
        made: what became of each graph.
        missed: the names of the needed products that were not fused.
    """

    def __init__(
        self,
        least_mb: float = 0,
        strategy: str = "auto",
        needed: Collection[str] = (),
        **options: Any,
    ) -> None:
        self.least_mb = least_mb
        self.strategy = strategy
        self.needed = frozenset(needed)
        self.options = {"compiled": False} | options
        self.made: list[Rewritten] = []
        self.missed: set[str] = set()

    def __call__(self, graph: Graph) -> None:
        """As Inductor calls it (``joint_custom_pre_pass``)."""
        module = graph.owning_module
        if module is not None:
            self.rewrite(module)

    def rewrite(self, module: GraphModule) -> None:
        """Rewrites a graph, and notes what became of it.

        Raises:
            UnfusedError: it has logits that must not exist.
        """
        made = rewrite(module, self.least_mb, self.strategy, **self.options)
        self.made.append(made)
        self._check(module.graph, {head.name for head in made.heads})

    def _check(self, graph: Graph, fused: Collection[str] = ()) -> None:
        products = (n for n in graph.nodes if n.op == "call_function" and packet(n) in PRODUCTS)
        self.missed |= {name_of(n) or "" for n in products} & self.needed - {*fused}
        if self.missed:
            raise UnfusedError(f"logits of {sorted(self.missed)} exist")

    def key(self) -> str:
        """Changes with the code and the settings: torch's caches are keyed by it."""
        top = Path(__file__).parents[1]
        files = [file for name in CODE for file in sorted((top / name).glob("*.py"))]
        options = sorted(self.options.items())
        settings = f"{self.least_mb} {self.strategy} {options} {sorted(self.needed)}"
        return str(get_hash_for_files(tuple(map(str, files)), extra=settings))

    def backend(self) -> Any:
        """A backend of ``torch.compile`` that runs the rewritten graphs in eager. A graph without a
        call is that of ``aot_eager``."""

        def partition(module: GraphModule, inputs: Any, **options: Any) -> Any:
            found = self._decomposed(module)
            return min_cut_rematerialization_partition(found, inputs, **options)

        def inference(module: GraphModule, _: Any) -> Any:
            return boxed_nop(self._decomposed(module), [])

        def plain(module: GraphModule, _: Any) -> Any:
            return boxed_nop(module, [])

        compiled = aot_autograd(
            fw_compiler=plain,
            bw_compiler=plain,
            inference_compiler=inference,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )

        def backend(module: GraphModule, inputs: Any, **options: Any) -> Any:
            mark(module)
            return compiled(module, inputs, **options)

        return backend

    def _decomposed(self, module: GraphModule) -> GraphModule:
        """The rewritten graph, of what Inductor makes of it before; the graph itself, if there is
        no call in it."""
        found = module
        if may_have_heads(module.graph, self.least_mb) and not _raises(module.graph):
            try:
                found = decomposed(module)
            except Exception:  # of dtypes that no kernel multiplies
                log.debug("no decomposition", exc_info=True)
        if found is module:
            self.made.append(Rewritten(graph=module))
            self._check(module.graph)
            return module
        self.rewrite(found)
        return found if self.made[-1].calls else module


def _raises(graph: Graph) -> bool:
    """Whether a kernel of torch refuses class weights that a decomposition takes."""
    losses = (n for n in graph.nodes if packet(n) in _WEIGHTED)
    weighted = ((value(n.args[0]), value(n.args[2])) for n in losses if n.args[2] is not None)
    return any(of.dtype != weight.dtype for of, weight in weighted)


_WEIGHTED = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}


class _Reshaping(PropagateUnbackedSymInts):
    """Runs a graph whose tensors may have other strides than when it was traced."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = A.reshape.default if target is A.view.default else target
        return super().call_function(target, args, kwargs)


def decomposed(module: GraphModule) -> GraphModule:
    """A graph with Inductor's decompositions."""
    inputs = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in inputs]

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return _Reshaping(module).run(*args)

    mode = detect_fake_mode(values)
    with mode or nullcontext(), enable_python_dispatcher():
        made = make_fx(run, decomposition_table=decompositions())(*values)
    for old, new in zip(inputs, made.graph.find_nodes(op="placeholder"), strict=True):
        new.target = new.name = old.name  # the partitioner reads them
        new.meta |= {k: v for k, v in old.meta.items() if k != "val"}
    made.recompile()
    return made


def decompositions() -> dict[Any, Any]:
    """Those of Inductor, but for random numbers, which are eager's."""
    random = torch.Tag.nondeterministic_seeded
    found = select_decomp_table()
    return {op: found[op] for op in found if random not in getattr(op, "tags", ())}
