"""Mixture of experts, from the residual stream before the block to the one after it."""
