"""Loss and gradients of every provider at 16 bits, in errors of float64."""
