"""Encoder families: attention in both directions, no KV cache."""
