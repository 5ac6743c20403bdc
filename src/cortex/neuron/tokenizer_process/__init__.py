"""Tokenising in a process of its own: building a large tokenizer holds an interpreter up, and the daemon answers."""
