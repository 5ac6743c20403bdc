"""Matrix products for small batches: dense and four-bit."""
