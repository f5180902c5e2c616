"""Memory of programs of which little is fused, beside the inner backend's."""
