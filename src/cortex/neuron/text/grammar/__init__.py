"""Grammars that constrain the output, and the matcher that applies them."""
