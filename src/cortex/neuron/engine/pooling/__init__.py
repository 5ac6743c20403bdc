"""The engine of embedding and rerank models: one pass over each text, no KV pages."""
