"""Streams of fleet events, and what each key may see of them."""
