"""A training step of a whole model that returns its logits, in a process of its own.

``python llama_step.py BACKEND`` prints the process's peak memory during one step, and what it held
when everything was imported, in bytes.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fxpass.cli.memory import Memory

VOCABULARY, ROWS, HIDDEN = 64000, 2048, 128


def main(backend: str) -> None:
    memory = Memory(torch.device("cpu"))
    memory.start()
    imported = memory.rest
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(VOCABULARY, (4, ROWS // 4))
    compiled = torch.compile(model, backend=backend)

    def step() -> torch.Tensor:
        out = compiled(input_ids=tokens, labels=tokens)
        out.loss.backward()
        optimizer.step()  # while the logits are alive
        optimizer.zero_grad()
        return out.logits

    step()  # compiles
    memory.start()
    step()
    added = memory.added()
    assert memory.rest is not None
    assert added is not None
    print(memory.rest + added, imported)


if __name__ == "__main__":
    main(sys.argv[1])
