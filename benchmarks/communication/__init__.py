"""The bytes that the ranks of a sharded head exchange, counted and modelled."""
