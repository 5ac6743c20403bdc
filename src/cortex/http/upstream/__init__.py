"""The node's side of the data path: pooled connections, and the calls on them."""
