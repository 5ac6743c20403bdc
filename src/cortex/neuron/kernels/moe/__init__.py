"""A mixture of experts, from the residual stream before it to the one after."""
