"""Model files: safetensors, GGUF, the hub."""
