"""Prepares Dynamo's graph, and calls the inner backend, with the pass on the joint graph.

``transform`` has all rewrites of one graph in order. Imports ``rows``, ``region``, ``releases``,
``casts``, ``op``, ``deferred``, ``graph``, ``plan`` and ``formula``, and from ``kernels`` the
launches that ``explain`` shows.
"""
