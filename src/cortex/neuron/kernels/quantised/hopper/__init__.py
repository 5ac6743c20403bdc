"""Packed experts on Hopper, in Gluon, Triton's lower language."""
