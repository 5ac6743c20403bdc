"""The HTTP API of a node: every dialect natively, and the node's own routes. No torch in this process."""
