"""What recurrent layers share: how a step's rows are processed, the causal convolution, and the layer that is only it."""
