"""Matrices of two to eight bits on a GPU: their layout, how they are packed, and the GEMMs with them."""
