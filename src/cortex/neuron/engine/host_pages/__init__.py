"""KV pages and recurrent states in host memory, where they outlive their model."""
