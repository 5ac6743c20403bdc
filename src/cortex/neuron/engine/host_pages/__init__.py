"""KV pages and recurrent states in host memory: they outlast the device memory of their model, and the model itself."""
