"""The node daemon: discovers the host's devices and runs models on them."""
