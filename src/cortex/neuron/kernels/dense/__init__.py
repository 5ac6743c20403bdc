"""Matrices in the dtype that the model computes in."""
