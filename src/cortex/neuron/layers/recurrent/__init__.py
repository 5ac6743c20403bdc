"""Mixers that keep a state of fixed size for every sequence: their description as data, and their computation."""
