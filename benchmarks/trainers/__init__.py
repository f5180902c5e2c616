"""Training loops whose loss is outside of the compiled model."""
