"""Attention over paged latents, which all heads share (MLA): products by head, decode, prefill."""
