"""The models of a node: one controller each, loading, admission, sleep and recovery."""
