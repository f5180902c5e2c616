"""Rewrites the matches of a graph, and calls the inner backend.

No other package changes a graph for a match. ``transform`` shows all rewrites of a graph in order.
Imports ``capture``, ``lower``, ``region``, ``casts``, ``op``, ``deferred``, ``graph``, ``plan`` and
``spec``, and from ``kernels`` the sources that ``explain`` shows.
"""
