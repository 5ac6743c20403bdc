"""The blocks that the families are made of."""
