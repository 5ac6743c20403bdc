"""Hosts of models: `device` (in the worker of one device), and two that combine others: `sharded` (the ranks of a
divided model, here and on other nodes) and `replicated` (the replicas of a model)."""
