"""The cortex server: one endpoint over the fleet. Never imports neuron."""
