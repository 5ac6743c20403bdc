"""Draws tokens from logits on the device: options by row, cuts of the vocabulary, noise, log-probabilities."""
