"""The connections of a node: those of clients, and those of other nodes."""
