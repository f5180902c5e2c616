"""Comparisons of logits with values of other logits, such as the largest of a row.

In: the nodes of regions. Out: nothing, or :class:`fxpass.rows.tags.Stop`. Logits are computed again
in each pass, and their last bits may differ: a value that is one of them is equal to it only where
both are of the same pass::

    z >= amax(z, [1], True)    amax is of each pass
    z >= amax(z)               declined: it is of the pass before
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch.fx import Node

from fxpass.rows.rules import VIEWS, A, P, Rules
from fxpass.rows.sizes import packet
from fxpass.rows.tags import Stop

COMPARISONS = {A.eq, A.ne, A.ge, A.gt, A.le, A.lt}
# What returns some of the values that it is given.
_CHOOSES = {A.amax, A.amin, A.max, A.min, A.aminmax, A.sort, A.topk, A.kthvalue, A.median, A.cat}
_CHOOSES |= {A.gather, A.index, A.index_select, A.where, A.maximum, A.minimum, A.clone, A._to_copy}
_CHOOSES |= {A.masked_fill, A.clamp_min, A.clamp_max, A.clamp, P.convert_element_type}
_CHOOSES |= {operator.getitem, *VIEWS}


def check_passes(rules: Rules, inside: Collection[Node]) -> None:
    """Refuses logits that are compared with one of all rows, which another pass has chosen.

    Args:
        inside: the nodes of regions.

    Raises:
        Stop: a node compares such values.
    """
    for node in inside:
        if packet(node) not in COMPARISONS or not rules.has_classes(node):
            continue
        todo = [n for n in node.all_input_nodes if not rules.has_classes(n)]
        seen = set[Node]()
        while todo:
            seen.add(one := todo.pop())
            if packet(one) not in _CHOOSES:
                continue
            if one not in inside and any(n in inside for n in one.all_input_nodes):
                stop = Stop("compares logits with a value of all rows, which another pass computes")
                stop.node = node
                raise stop
            todo += [n for n in one.all_input_nodes if n not in seen]
