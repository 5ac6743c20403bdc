"""Placement: whether a model fits a node, what is evicted for it, and the decision with its reasons."""
