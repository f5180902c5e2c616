"""The plan of a fused loss: sizes, dtype and device in; strategy and sizes of chunks or tiles out.

Pure functions and one page of rules. Nothing is measured, so equal machines get equal plans.
Imports ``formula``.
"""
