"""Shared by recurrent layers: the rows of a step, the causal convolution, and the layer that consists of it."""
