"""The layer itself: linear and cross-entropy of one size, provider by provider, numerics first."""
