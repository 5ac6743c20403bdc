"""Embeddings, rerank and scores on the wire: one request for every route, and the response in its shape."""
