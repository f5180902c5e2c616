"""Memory of programs with few or no fused losses, compared with the inner backend alone."""
