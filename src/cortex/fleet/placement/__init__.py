"""Where a model runs: whether it fits, what is evicted for it, and the decision with its reasons."""
