"""A defect of torch up to 2.12."""

from __future__ import annotations

import torch

# Inductor's C++ compares values that were cast to 16 bits as they were before the cast
# (https://github.com/pytorch/pytorch/issues/185337).
COMPARES_UNROUNDED: bool = torch.__version__ < "2.13"
