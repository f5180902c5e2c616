"""Finds linear → cross-entropy in a graph, and decides for each loss whether it is fused.

In: a region of a Dynamo graph, with ``example_value`` on its nodes. Out: for every loss a
:class:`Match`, which :mod:`fxpass.rewrite.rewrite` fuses, or a :class:`Rejection` with the reason
for the user. :mod:`fxpass.match.losses`, :mod:`fxpass.match.chain` and :mod:`fxpass.match.linears`
read the pattern; :mod:`fxpass.match.logit_users` finds other users of the logits. The graph does
not change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxpass.graph import hazards
from fxpass.graph.functions import reads_values
from fxpass.graph.nodes import NoMatch, hint, is_tensor, value
from fxpass.graph.region import Region
from fxpass.graph.source import source_line
from fxpass.match import profitability
from fxpass.match.chain import Chain, chain_of, check_operands
from fxpass.match.folds import Stack
from fxpass.match.heads import Head, heads_of
from fxpass.match.logit_users import LogitUsers
from fxpass.match.losses import Loss, check_dtypes, loss_of
from fxpass.match.modes import Mode, check_modes, modes_of
from fxpass.match.schedule import scheduled
from fxpass.match.sharding import Sharding, check_existing, sharding_of
from fxpass.plan.choice import Choice
from fxpass.settings import Settings
from fxpass.spec.spec import GRADIENTS, Spec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rejection:
    """A loss that is not fused.

    Attributes:
        node: the node at which reading stopped.
        reason: why, as a sentence without its first capital.
        source: the user's line of the loss.
        costs: whether fusing it, in whatever way, would cost more memory than it saves.
        linear: the linear of its logits, if it is known.
    """

    node: Node
    reason: str
    source: str
    costs: bool = False
    linear: Node | None = None

    def __str__(self) -> str:
        return f"not fused: {self.source}: {self.reason}"


@dataclass(frozen=True)
class Match:
    """A linear → cross-entropy that can be fused.

    Attributes:
        loss: the loss.
        chain: the nodes from the linear to the loss.
        lse: a log-sum-exp of the same logits (z-loss) that the operator also returns, or None.
        logits_mode: ``never``: the logits are never materialised; ``keep``: the graph materialises
            them, and the operator reads them; ``defer`` or ``drop``: a deferred or dropped tensor
            takes their place among the graph's outputs.
        spec: the computation.
        shape: rows and classes; both may be symbolic.
        source: the user's line of the loss.
        sharding: the ranks of its classes and rows; None for one rank.
        choice: the strategy and its reason; None until it is chosen.
        detached: whether no gradient flows through the loss although its operands need gradients.
        changed: whether the graph writes to its operands later, so that backward must not read
            them.
        recomputed: whether the operator recomputes logits that the graph materialises: the logits
            are also an output, and the user may write to them before backward.
    """

    loss: Loss
    chain: Chain
    lse: Loss | None
    logits_mode: str
    spec: Spec
    shape: tuple[int | torch.SymInt, int | torch.SymInt]
    source: str
    sharding: Sharding | None = None
    choice: Choice | None = None
    detached: bool = False
    changed: bool = False
    recomputed: bool = False

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of this rank's logits in the linear's output dtype; 0 if not known."""
        rows, v = map(hint, self.shape)
        if self.sharding is not None:
            rows, v = rows // self.sharding.rows, self.sharding.count
        return rows * v * value(self.chain.linear.node).dtype.itemsize

    def __str__(self) -> str:
        n, v = self.shape
        left = {
            "keep": " (logits kept: another node reads them)",
            "defer": " (logits deferred: computed when they are first used)",
            "drop": " (logits dropped: their values cannot be used)",
        }
        ranks = f" ({self.sharding})" if self.sharding and str(self.sharding) else ""
        return (
            f"fused: {self.source}: logits [{n}, {v}]{ranks}, {self.spec.text()}"
            f"{left.get(self.logits_mode, '')}"
        )


@dataclass(frozen=True)
class Found:
    """The matches and rejections of one region in the graph's order, its deferred outputs, each
    with the nodes that compute it (the linears and the nodes after them), and the heads whose
    logits are reduced in other ways than by a loss."""

    matches: tuple[Match, ...]
    rejections: tuple[Rejection, ...]
    deferred: dict[Node, tuple[Node, ...]]
    heads: tuple[Head, ...] = ()


def find(region: Region, settings: Settings) -> Found:
    """A match or a rejection for every loss of a region."""
    nodes = region.module.graph.nodes
    modes = modes_of(region.module.graph)
    found: list[Match | Rejection] = []
    for node in nodes:
        loss = None
        try:
            loss = loss_of(node)
            if loss is not None:
                check_dtypes(loss, region)
                found.append(_match(loss, modes, settings))
        except NoMatch as no:
            if loss is None or not loss.speculative:
                costs = isinstance(no, _Costs)
                found.append(Rejection(no.node, no.reason, source_line(node), costs))
        except Exception as error:
            # the graph has not changed yet: an unforeseen program runs without the rewrite
            log.warning("%s: reading the graph failed", source_line(node), exc_info=True)
            reason = f"fxpass failed to read it, please report this: {error!r}"
            found.append(Rejection(node, reason, source_line(node)))
    found = _with_whole_stacks(_without_gradients(_without_parts(found), settings))
    found, users = _decide(region, found, settings)
    found = _with_lse(found)
    found, heads = _with_heads(region, found, modes, settings)
    matches = [m for m in found if isinstance(m, Match)]
    return Found(
        tuple(scheduled(m, settings, profitability.others(m, matches)) for m in matches),
        tuple(m for m in found if isinstance(m, Rejection)),
        users.deferred,
        heads,
    )


def _with_heads(
    region: Region,
    found: list[Match | Rejection],
    modes: dict[Node, Mode],
    settings: Settings,
) -> tuple[list[Match | Rejection], tuple[Head, ...]]:
    """Without the losses of heads all of whose reductions are fused, and these heads."""
    matches = [m for m in found if isinstance(m, Match) and m.logits_mode != "keep"]
    waits = (m for m in matches if m.spec.gradients and m.spec.reduction == "none")
    waiting = {m.chain.linear.node for m in waits if m.sharding is None}
    taken = {m.chain.linear.node for m in matches} - waiting
    made, stopped = heads_of(region, taken, modes, settings)
    # a total saves a loss that waits for the gradients of its rows the second pass
    made = tuple(h for h in made if h.flow.linear.node not in waiting or h.in_forward)
    rejected = [m for m in found if isinstance(m, Rejection) and m.costs]
    stay = {n for m in rejected for n in (m.node, *m.node.all_input_nodes)}
    made = tuple(head for head in made if stay.isdisjoint(head.nodes))
    linears = {head.flow.linear.node for head in made}
    inside = {node for head in made for node in head.nodes}
    left = [
        m
        for m in found
        if (isinstance(m, Match) and m.chain.linear.node not in linears)
        or (isinstance(m, Rejection) and m.node not in inside)
    ]
    known = {m.linear if isinstance(m, Rejection) else m.chain.linear.node for m in found}
    known |= {m.node for m in found if isinstance(m, Rejection)}
    left += [
        Rejection(no.node, no.reason, source_line(linear))
        for linear, no in stopped.items()
        if known.isdisjoint((linear, no.node))
    ]
    return left, made


def _match(loss: Loss, modes: dict[Node, Mode], settings: Settings) -> Match:
    chain = chain_of(loss)
    check_operands(chain)
    sharding = sharding_of(loss, chain)
    pattern = {*chain.nodes, *loss.inner, *loss.counted, loss.node}
    if found := hazards.hazard(pattern, loss.node):
        raise NoMatch(*found)
    check_modes(loss, chain, modes)
    logits = value(loss.logits)
    v = logits.shape[loss.dim]
    spec = _spec(loss, chain, settings, sharding)
    changed = hazards.hazard(pattern, loss.node.graph.output_node()) if spec.gradients else None
    if changed and (spec.reduction == "none" or sharding is not None):
        node, reason = changed
        raise NoMatch(node, f"{reason}, and backward computes the gradients from it")
    match = Match(
        loss=loss,
        chain=chain,
        lse=None,
        logits_mode="never",
        spec=spec,
        shape=(_rows(logits, loss.dim), v),
        source=source_line(loss.node),
        sharding=sharding,
        detached=modes[loss.node].grad
        and not value(loss.node).requires_grad
        and any(value(n).requires_grad for n in chain.operands if is_tensor(n)),
        changed=changed is not None,
    )
    for rule in profitability.RULES:
        _worth_it(loss, rule(match, settings.min_logits_mb), _Costs)
    return match


class _Costs(NoMatch):
    """Why fusing a loss would cost more memory than it saves."""


def _worth_it(loss: Loss, reason: str | None, kind: type[NoMatch] = NoMatch) -> None:
    if reason:
        raise kind(loss.node, f"{reason} (FUSEDCE_MIN_LOGITS_MB=0 fuses all)")


def _rows(logits: torch.Tensor, dim: int) -> int | torch.SymInt:
    rows: int | torch.SymInt = 1
    for i, size in enumerate(logits.shape):
        rows = rows * size if i != dim else rows
    return rows


def _spec(loss: Loss, chain: Chain, settings: Settings, sharding: Sharding | None) -> Spec:
    try:
        return Spec(
            reduction=loss.reduction,
            target="none"
            if loss.target is None
            else "probabilities"
            if loss.probabilities
            else "indices",
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            transform=chain.expr,
            gradients=_gradients(loss, chain),
            shard_of=sharding.classes if sharding is not None and sharding.group else 0,
            memory_mb=settings.memory_mb,
        )
    except ValueError as error:
        raise NoMatch(loss.node, str(error)) from error


def _gradients(loss: Loss, chain: Chain) -> tuple[str, ...]:
    if not value(loss.node).requires_grad:
        return ()
    return tuple(
        name for name in GRADIENTS if any(value(n).requires_grad for n in chain.read_by(name))
    )


def _without_parts(found: list[Match | Rejection]) -> list[Match | Rejection]:
    """Without losses that are only a part of another match's spelling."""
    matches = [m for m in found if isinstance(m, Match)]
    inner = {node for m in matches for node in m.loss.inner}
    owners = {m.loss.node for m in matches}
    return [
        m
        for m in found
        if not (
            isinstance(m, Match)
            and m.loss.node in inner
            and all(
                user in owners or user in inner or not reads_values(user, m.loss.node)
                for user in m.loss.node.users
            )
        )
    ]


def _without_gradients(
    found: list[Match | Rejection], settings: Settings
) -> list[Match | Rejection]:
    """With rejections of losses over one weight whose weight gradients take too much memory."""
    matches = [m for m in found if isinstance(m, Match)]
    out: list[Match | Rejection] = []
    for one in found:
        try:
            if isinstance(one, Match):
                reason = profitability.many_gradients(one, matches, settings.min_logits_mb)
                _worth_it(one.loss, reason, _Costs)
            out.append(one)
        except NoMatch as no:
            linear = one.chain.linear.node if isinstance(one, Match) else one.linear
            out.append(Rejection(no.node, no.reason, one.source, True, linear))
    return out


def _with_whole_stacks(found: list[Match | Rejection]) -> list[Match | Rejection]:
    """With rejections of matches with a stack in which another head has no match. In eager, the
    stack gives that head a gradient of zeros; without the stack it would get None."""
    while True:
        taken = {n for m in found if isinstance(m, Match) for n in m.chain.nodes}
        checked = [_with_whole_stack(m, taken) if isinstance(m, Match) else m for m in found]
        if checked == found:
            return found
        found = checked


def _with_whole_stack(match: Match, taken: set[Node]) -> Match | Rejection:
    for stack in (s.node for s in match.chain.folds if isinstance(s, Stack)):
        for head in stack.all_input_nodes:
            if head not in taken and match.spec.gradients and value(head).requires_grad:
                reason = f"%{stack.name} (stack) has a head without a fused loss, %{head.name}"
                return Rejection(head, reason, match.source)
    return match


# ---------------------------------------------------------------- other users of the logits


def _decide(
    region: Region, found: list[Match | Rejection], settings: Settings
) -> tuple[list[Match | Rejection], LogitUsers]:
    """With each match's ``logits_mode``; rejections where the operator cannot read kept logits."""
    while True:
        users = LogitUsers(region, [m for m in found if isinstance(m, Match)], settings)
        decided = [_decided(m, users, settings) if isinstance(m, Match) else m for m in found]
        if sum(isinstance(m, Match) for m in decided) == sum(isinstance(m, Match) for m in found):
            return [m for m in decided if m is not None], users
        # the operands of a rejected loss have to exist: decide again
        pairs = zip(decided, found, strict=True)
        found = [m if isinstance(s, Match) else s for s, m in pairs if s is not None]


def _decided(match: Match, users: LogitUsers, settings: Settings) -> Match | Rejection | None:
    """None for a log-sum-exp of logits that exist anyway (a router's): fusing it gains nothing."""
    loss = match.loss
    try:
        users.check_inner(match)
        mode = users.logits_mode(match)
        if mode != "keep":
            return replace(match, logits_mode=mode)
        if loss.speculative:
            return None
        _worth_it(loss, profitability.kept_for_users(match, settings.min_logits_mb))
        # the same loss, read from a node that no later node writes to
        chain = chain_of(loss, written_base=True)
        if match.sharding is not None:
            check_existing(chain, match.sharding)
        spec = replace(match.spec, transform=chain.expr)
        return replace(match, logits_mode="keep", chain=chain, spec=spec)
    except NoMatch as no:
        return Rejection(no.node, no.reason, match.source, linear=match.chain.linear.node)


# ---------------------------------------------------------------- z-loss


def _with_lse(found: list[Match | Rejection]) -> list[Match | Rejection]:
    """Joins a loss and a log-sum-exp of the same logits: one pass over the logits computes both."""
    out = list(found)
    for lse in [m for m in found if isinstance(m, Match) and m.loss.target is None]:
        for i, match in enumerate(out):
            if not isinstance(match, Match) or match.loss.target is None or match.lse is not None:
                continue
            same = match.loss.logits is lse.loss.logits and match.loss.dim == lse.loss.dim
            same = same and not match.changed
            same = same and bool(match.spec.gradients) == bool(lse.spec.gradients)
            if same and not match.loss.log_softmax and _joinable(match.loss, lse.loss):
                gradients = tuple(
                    g for g in GRADIENTS if g in match.spec.gradients or g in lse.spec.gradients
                )
                spec = replace(match.spec, lse=True, gradients=gradients)
                out[i] = replace(match, lse=lse.loss, spec=spec)
                out.remove(lse)
                break
    return out


def _joinable(loss: Loss, lse: Loss) -> bool:
    """Whether all users of the log-sum-exp come after the loss, which computes both."""
    of_loss = {loss.node, *loss.inner}
    return all(user > loss.node for user in lse.node.users if user not in of_loss)
