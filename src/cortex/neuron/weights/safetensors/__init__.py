"""Safetensors: a JSON table of tensors, then their bytes."""
