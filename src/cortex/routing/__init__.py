"""Which of several replicas of a model serves a request: of nodes in a fleet, and of devices in a node. Pure."""
