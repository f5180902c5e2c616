"""The training step of a whole model that returns its logits."""
