"""Converts configurations of other programs to ours."""
