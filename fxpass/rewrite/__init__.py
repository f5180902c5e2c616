"""Carries matches out, and hands the graph on to the inner backend.

The only place that changes graphs for matches; ``transform`` is the story of a graph on one page.
Imports ``match``, ``casts``, ``op``, ``deferred``, ``graph``, ``plan`` and ``spec``, and from
``kernels`` the text that ``explain`` prints.
"""
