"""What recurrent layers share: the rows of a step, the causal convolution, and the layer that is only that."""
