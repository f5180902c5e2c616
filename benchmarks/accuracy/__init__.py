"""Errors of every provider's loss and gradients against float64, in f32 and 16 bits."""
