"""Models that span nodes: the lead's connections to its peers, and the parts that this node holds for other leads."""
