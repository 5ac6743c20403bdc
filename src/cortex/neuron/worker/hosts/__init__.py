"""Hosts of models: `device` (in the worker of one device), and two combinators of hosts, `all_of` (the ranks of a
divided model, here and on other nodes) and `any_of` (the replicas of a model)."""
