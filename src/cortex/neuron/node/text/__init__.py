"""The text work of a node's models: prompts, tokenizers, and slots for requests."""
