"""Comparisons of logits with other logits, such as the largest of a row.

In: the nodes of regions. Out: nothing, or :class:`fxpass.rows.tags.Stop`. Each pass over the rows
recomputes logits, and their last bits may differ. So a chosen logit is equal to itself only where
both sides of the comparison are of the same pass::

    z >= amax(z, [1], True)    each pass computes its own maximum of a row
    z >= amax(z), amax(z, [0]) declined: an earlier pass computed the maximum of all rows
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch.fx import Node

from fxpass import messages
from fxpass.rows.aten_calls import VIEWS, A, P
from fxpass.rows.rules import Rules
from fxpass.rows.sizes import packet
from fxpass.rows.tags import Stop

COMPARISONS = {A.eq, A.ne, A.ge, A.gt, A.le, A.lt}
# Operations that return some of their arguments' values.
_CHOOSES = {A.amax, A.amin, A.max, A.min, A.aminmax, A.sort, A.topk, A.kthvalue, A.median, A.cat}
_CHOOSES |= {A.gather, A.index, A.index_select, A.where, A.maximum, A.minimum, A.clone, A._to_copy}
_CHOOSES |= {A.masked_fill, A.clamp_min, A.clamp_max, A.clamp, P.convert_element_type}
_CHOOSES |= {operator.getitem, *VIEWS}


def check_passes(rules: Rules, inside: Collection[Node]) -> None:
    """Refuses comparisons of logits with a logit that another pass has chosen from all rows.

    Args:
        inside: the nodes of regions.

    Raises:
        Stop: a node is such a comparison.
    """
    for node in inside:
        if packet(node) not in COMPARISONS or not rules.has_classes(node):
            continue
        todo = [n for n in node.all_input_nodes if not rules.has_classes(n)]
        seen = set[Node]()
        while todo:
            seen.add(chosen := todo.pop())
            if packet(chosen) not in _CHOOSES:
                continue
            of_all = chosen not in inside or rules.is_sum(chosen)
            if of_all and any(n in inside for n in chosen.all_input_nodes):
                stop = Stop(messages.COMPARED)
                stop.node = node
                raise stop
            todo += [n for n in chosen.all_input_nodes if n not in seen]
