"""Quantised matrices in a CPU's memory."""
