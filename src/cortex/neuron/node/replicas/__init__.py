"""Extra replicas of models, which the node adds and removes as demand asks."""
