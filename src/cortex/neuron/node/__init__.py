"""The models of a node: one owner task each, preflight, placement on its devices, recovery."""
