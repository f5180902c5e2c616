"""Regions of rows beside Inductor: memory, time of a step, and of compilation."""
