"""One inference request, from the client's bytes to its usage record."""
