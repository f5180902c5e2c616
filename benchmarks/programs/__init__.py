"""A table of programs that reduce the logits of a head: fused, logits kept, or why not."""
