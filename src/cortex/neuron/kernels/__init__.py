"""Triton kernels, each beside the plain torch reference that its test compares it with."""
