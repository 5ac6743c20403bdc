"""What makes a vector or a score of the hidden states of a text."""
