"""Servers as harnesses: a command of `neuron.toml` runs a model, and its requests are relayed to it."""
