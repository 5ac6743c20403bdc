"""What a step must read and compute, and how fast the device can."""
