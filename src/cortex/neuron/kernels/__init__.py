"""Triton kernels, each next to the plain torch reference that its test compares it with."""
