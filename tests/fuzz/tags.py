"""Whether the rows of a program are as independent as their tags say.

In: a case. Out: what is wrong, as text. The program is captured as the rewrite does it, and its tags
are held against its values by :mod:`tests.support.row_tags`: one row of a head's logits changes, and
a chunk of rows is computed alone.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.row_tags import Check, observer

from .case import Case


def wrong_tags(case: Case) -> str:
    """The first promise that a program's tags break; empty if they keep all."""
    found = checked(case)
    return found.wrong[0] if found.wrong else ""


def checked(case: Case) -> Check:
    """The check of a program's tags, in all calls of its session."""
    found, env = Check(), dict[str, Any]()
    exec(compile(case.source(), "<program of tags>", "exec"), env)
    env["backward"] = lambda *losses, **rest: None  # the values of forward are all there is to see
    program = torch.compile(env["program"], backend=observer(found), dynamic=case.dynamic)
    torch.manual_seed(0)
    # sizes as in tests.fuzz.oracle.run
    sizes = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=bool(case.dynamic))
    try:
        with sizes:
            env["session"](program, env["inputs"], lambda value: None)
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        found.wrong.append(f"the tags cannot be checked: {type(error).__name__}: {what}")
    return found
