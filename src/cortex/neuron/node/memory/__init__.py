"""What bounds the memory of models on a node: the operator's ceilings, and the budget of sleeping models."""
