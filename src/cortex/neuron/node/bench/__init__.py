"""Measures how fast a model is on this node, and keeps the results."""
