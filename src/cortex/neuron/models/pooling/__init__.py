"""Pooling: from the hidden states of a text to a vector or a score."""
