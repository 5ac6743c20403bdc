"""Pictures in prompts: their number of tokens, and the preparation of their pixels. Imports no torch."""
