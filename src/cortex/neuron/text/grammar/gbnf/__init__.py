"""GBNF, the grammar notation of llama.cpp: its syntax tree, reader, checks, and translation into Lark."""
