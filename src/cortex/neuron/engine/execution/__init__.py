"""Running a planned step on the device: inputs, the forward pass, CUDA graphs."""
