"""Extra replicas of models, which the node adds and removes on demand."""
