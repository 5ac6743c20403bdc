"""From the files of a model to a model in memory, with its kernels compiled."""
