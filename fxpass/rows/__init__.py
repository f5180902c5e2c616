"""The pass on AOTAutograd's joint graph: regions of rows become calls of ``fxpass::rows``.

Tags say which dimensions are rows, rules how a node runs on a chunk, phases what runs together.
Imports ``op``, ``region``, ``graph``, ``plan`` and ``formula``.
"""

import torch._inductor.inductor_prims  # noqa: F401  adds prims.fma, which rules name
