"""Functions in C for CPUs, compiled for the host on first use."""
