"""Attention over paged KV: decode, prefill, rotation."""
