"""Attention over paged KV: decode, prefill, whole prompts through cuDNN, rotation."""
