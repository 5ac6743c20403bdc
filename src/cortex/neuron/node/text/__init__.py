"""The text work of a node's models: prompts, tokenizers, and the places that requests wait for."""
