"""Models that have no family here: the modules of the `transformers` library on our weights, KV pages and batches."""
