"""Matrix products for small batches: dense, and in four bits."""
