"""Devices, dtypes and heads that the tests of plans and choices are about."""

from __future__ import annotations

import torch

from fxpass.plan.budget import MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
BOTH = ("x", "weight")
GIB = 1024 * MIB

# D and V of heads
HEADS = {
    "Llama-3-8B": (4096, 128256),
    "Llama-3.2-1B": (2048, 128256),
    "Qwen3-8B": (4096, 151936),
    "Gemma-2-2B": (2304, 256000),
    "GPT-2": (768, 50257),
}
