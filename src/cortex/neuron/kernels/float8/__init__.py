"""Matrices in eight-bit floating point, multiplied on FP8 tensor cores where the card has them."""
