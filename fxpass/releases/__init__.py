"""Workarounds for single releases of torch: a module for each release, removed with its support.

A module has the name of the newest release that needs it: ``torch_2_12`` is for torch up to 2.12.
Imports nothing of fxpass.
"""
