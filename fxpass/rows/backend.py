"""The pass as AOTAutograd runs it: on a joint graph, or on an inference graph.

In: a graph. Out: the same graph with the calls, and a :class:`Rewritten`, the outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
from fxpass.rows.alike import mark_alike
from fxpass.rows.aten_calls import A
from fxpass.rows.chosen import choose_rows
from fxpass.rows.collectives import spell_gathers
from fxpass.rows.column_spelling import spell_sums
from fxpass.rows.comparisons import check_passes
from fxpass.rows.emit import emit
from fxpass.rows.heads import PRODUCTS, head_products, may_have_heads
from fxpass.rows.outputs import own_outputs
from fxpass.rows.reasons import Declined, FoundHead, FusedPart, declined, fused_part
from fxpass.rows.regions import Regions, find_regions
from fxpass.rows.sizes import example, numel, packet, shape
from fxpass.rows.softmaxes import restore_softmaxes
from fxpass.rows.spelling import spell
from fxpass.rows.stacks import unstack
from fxpass.rows.tags import Stop

log = logging.getLogger(__name__)


class _Attempt(NamedTuple):
    """How heads are looked for."""

    parts: bool = False  # parts of rows are heads of their own
    largest_only: bool = False  # only products with the most rows are heads
    classes_first: bool = False  # logits are [V, N]
    columns: bool = False  # reductions over rows are merged over chunks
    may_decline: bool = False  # the attempt counts even if it declines heads


_ATTEMPTS = (
    _Attempt(),
    _Attempt(parts=True),
    _Attempt(classes_first=True),
    _Attempt(columns=True),
    _Attempt(largest_only=True, may_decline=True),
    _Attempt(classes_first=True, may_decline=True),
)
# the packages that decide the graph and its values
CODE = ("rows", "region", "lower", "formula", "op", "aten", "kernels", "plan", "releases")


@dataclass
class Rewritten:
    """The outcome of one graph.

    Attributes:
        regions: the regions; None if there are no calls.
        calls: the number of calls.
        heads: the heads whose logits do not exist any more, in the order of the graph.
        parts: the calls, each with the names of its heads.
        names: the names of Dynamo's nodes that were traced into a region.
        declined: why other heads are left as they are.
        graph: the joint graph, as it is compiled.
        text: the text of the graph with the calls.
    """

    regions: Regions | None = None
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
        strategy: as of :func:`fxpass.rows.regions.find_regions`.
        options: ``memory_mb``, ``compiled`` and ``accumulate`` of the loops.
    """
    result = Rewritten(graph=module)
    module.graph.eliminate_dead_code()
    if not may_have_heads(module.graph, least_mb):
        return result
    for attempt in _ATTEMPTS:
        graph = _copied(module)
        try:
            spell(graph)
            restore_softmaxes(graph)
            unstack(graph, head_products(graph, least_mb))
            spell_gathers(graph, head_products(graph, least_mb))
            chosen = choose_rows(graph, head_products(graph, least_mb), attempt.parts)
            if attempt.parts and not chosen:
                continue
            if attempt.columns:
                spell_sums(graph)
            regions = find_regions(
                graph,
                least_mb,
                attempt.classes_first,
                attempt.largest_only,
                strategy,
                attempt.columns,
            )
            if regions is None:
                continue
            check_passes(regions.rules, regions.inside)
            if costs := _too_small(regions, least_mb):
                log.debug("%s", costs)
                return result
            why = [
                declined(head, stop, regions.backward) for head, stop in regions.declined.items()
            ]
            if regions.parts and (attempt.may_decline or not why):
                made = _emitted(graph, regions, options)
                own_outputs(graph, module.graph)
                module.graph = graph
                module.recompile()
                made.graph = module
                made.declined = why
                made.text = graph_text(module)
                return made
        except Stop as stop:
            why = [declined(None, stop)]
        except Exception as error:
            log.warning("the pass failed, please report this", exc_info=True)
            why = [Declined("", "", f"failed: {type(error).__name__}: {error}")]
        result.declined = result.declined or why
    return result


def _too_small(regions: Regions, least_mb: float) -> str | None:
    """The reason for which the heads of regions are not worth a loop."""
    heads = [head for head in regions.heads if head.node in regions.inside]
    if not heads:
        return None
    size = sum(numel(shape(head.node)) * example(head.node).itemsize for head in heads)
    hidden = heads[0].hidden if len(heads) == 1 else 0
    return too_small(size, sum(head.classes for head in heads), hidden, least_mb)


def _emitted(graph: Graph, regions: Regions, options: Mapping[str, Any]) -> Rewritten:
    """Puts the calls into a graph; returns their records."""
    names = {name for node in regions.inside if (name := name_of(node))}
    heads = [head.node for head in regions.heads]
    calls = emit(graph, regions, options)
    live = set(graph.nodes)
    in_forward = regions.factor is not None  # are gradients computed
    parts = []
    for call, part in zip(calls, regions.parts, strict=True):
        own = [head for head in heads if head in part.body]
        gradients = not regions.backward.isdisjoint(part.results)
        if call in live:
            parts.append(
                fused_part(call, own, gradients and not in_forward, gradients and in_forward)
            )
    return Rewritten(regions, len(parts), regions.fused_heads, parts, names)


def _copied(module: GraphModule) -> Graph:
    """The graph of a module, to be changed."""
    made = Graph(module)
    copies: dict[Node, Node] = {}
    made.output(made.graph_copy(module.graph, copies))
    return made


class UnfusedError(Exception):
    """Products whose logits must not exist are not fused. It is raised while AOTAutograd compiles:
    no cache has the code then."""


class RowsPass:
    """The pass on training and inference graphs.

    Args:
        least_mb, strategy, options: as of :func:`rewrite`.
        needed: the names of the products of Dynamo's graph whose logits must not exist.

    Attributes:
        made: the outcome of each graph.
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
        """Rewrites a graph, and adds the outcome to ``made``.

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
        """A key for torch's caches: a hash of the code and the settings."""
        top = Path(__file__).parents[1]
        files = [file for name in CODE for file in sorted((top / name).glob("*.py"))]
        options = sorted(self.options.items())
        settings = f"{self.least_mb} {self.strategy} {options} {sorted(self.needed)}"
        return str(get_hash_for_files(tuple(map(str, files)), extra=settings))

    def backend(self) -> Any:
        """A backend of ``torch.compile`` that runs the rewritten graphs in eager. Compiles a graph
        without a call as ``aot_eager`` does."""

        def partition(module: GraphModule, inputs: Any, **options: Any) -> Any:
            rewritten = self._rewritten(module)
            return min_cut_rematerialization_partition(rewritten, inputs, **options)

        def inference(module: GraphModule, _: Any) -> Any:
            return boxed_nop(self._rewritten(module), [])

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
            mark_alike(module)
            return compiled(module, inputs, **options)

        return backend

    def _rewritten(self, module: GraphModule) -> GraphModule:
        """The decomposed and rewritten graph; the graph itself, if that has no call."""
        made = module
        if may_have_heads(module.graph, self.least_mb) and not _mixes_dtypes(module.graph):
            try:
                made = decomposed(module)
            except Exception:  # of dtypes that no kernel multiplies
                log.debug("no decomposition", exc_info=True)
        if made is module:
            self.made.append(Rewritten(graph=module))
            self._check(module.graph)
            return module
        self.rewrite(made)
        return made if self.made[-1].calls else module


def _mixes_dtypes(graph: Graph) -> bool:
    """Is true if a loss has class weights of another dtype than its logits: decompositions take
    these, torch's kernels raise."""
    losses = (n for n in graph.nodes if packet(n) in _WEIGHTED)
    weighted = ((example(n.args[0]), example(n.args[2])) for n in losses if n.args[2] is not None)
    return any(logits.dtype != weight.dtype for logits, weight in weighted)


_WEIGHTED = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}


class _Reshaping(PropagateUnbackedSymInts):
    """Runs a graph whose tensors may have other strides than the traced ones."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = A.reshape.default if target is A.view.default else target
        return super().call_function(target, args, kwargs)


def decomposed(module: GraphModule) -> GraphModule:
    """A graph with Inductor's decompositions."""
    inputs = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in inputs]

    def reshaping(*args: Any) -> Any:
        with preserve_node_meta():
            return _Reshaping(module).run(*args)

    mode = detect_fake_mode(values)
    with mode or nullcontext(), enable_python_dispatcher():
        made = make_fx(reshaping, decomposition_table=decompositions())(*values)
    for old, new in zip(inputs, made.graph.find_nodes(op="placeholder"), strict=True):
        new.target = new.name = old.name  # the partitioner reads these
        new.meta |= {k: v for k, v in old.meta.items() if k != "val"}
    made.recompile()
    return made


def decompositions() -> dict[Any, Any]:
    """Inductor's decompositions, without those of random numbers, which stay as in eager."""
    random = torch.Tag.nondeterministic_seeded
    table = select_decomp_table()
    return {op: table[op] for op in table if random not in getattr(op, "tags", ())}
