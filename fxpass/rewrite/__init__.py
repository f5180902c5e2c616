"""Prepares Dynamo's graph, and calls the inner backend, with the pass on the joint graph.

``transform`` shows all that is done to one graph in order. Imports ``rows``, ``region``,
``casts``, ``op``, ``deferred``, ``graph``, ``plan`` and ``formula``, and from ``kernels`` what
``explain`` shows.
"""
