"""Time, memory and errors of linear and cross-entropy of one size, for every provider."""
