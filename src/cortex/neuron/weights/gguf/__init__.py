"""GGUF: one file with metadata, tokenizer and tensors, often in quantised blocks."""
