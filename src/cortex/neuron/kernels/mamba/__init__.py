"""Mamba-2: one-token steps, prefill in chunks, its norm."""
