"""Raise: decomposed subgraphs to canonical nodes."""
