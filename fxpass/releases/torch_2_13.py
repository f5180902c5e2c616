"""Behaviour of torch up to 2.13 that later releases changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

# The comparison under which clamp passes a gradient: up to torch 2.13 also at the bound, later not.
# The version decides: a test by autograd would start its threads, after which no process can fork.
ABOVE, BELOW = (">", "<") if torch.__version__ >= "2.14.0a0" else (">=", "<=")

# Inductor does not quote the folder of torch for the C++ linker.
SPLITS_PATHS: bool = torch.__version__ < "2.14.0.dev0"


def one_rank_settings() -> Any:
    """The module of the setting ``compile_on_one_rank``; None if torch has no such module."""
    # later releases warn about the old module
    if hasattr(torch.compiler.config, "compile_on_one_rank"):
        return torch.compiler.config
    return getattr(torch.distributed, "config", None)
