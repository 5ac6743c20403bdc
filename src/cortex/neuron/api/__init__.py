"""The HTTP front of a node."""
