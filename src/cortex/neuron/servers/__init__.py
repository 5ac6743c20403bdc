"""Servers that run models in place of the built-in engine: their settings in `neuron.toml`, and the ready-made ones."""
