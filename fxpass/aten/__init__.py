"""The fused loss in ATen: the reference of the tests, and the implementation for CPUs.

``common`` has the operands and the arithmetic of a tile; ``chunked``, ``tiled`` and ``in_place``
loop over chunks or tiles of logits. Imports ``spec`` and ``plan``.
"""
