"""The fused loss in ATen: what it means, the oracle of the tests, and what runs on CPUs.

``common`` holds the operands and the arithmetic of rows; ``chunked``, ``tiled`` and ``in_place``
say how much of the logits exists at a time. Imports ``spec`` and ``plan``.
"""
