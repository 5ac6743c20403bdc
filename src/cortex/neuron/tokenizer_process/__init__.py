"""Tokenizes in a separate process: building a large tokenizer blocks an interpreter for a second or more."""
