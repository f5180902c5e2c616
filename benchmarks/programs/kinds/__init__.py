"""Programs of torch alone: one module for each kind, see ``benchmarks.programs.catalog``."""
