"""The commands cortex and neuron."""
