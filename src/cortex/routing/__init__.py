"""Chooses the replica of a model that serves a request, among the nodes of a fleet or the devices of a node. Pure."""
