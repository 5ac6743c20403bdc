"""Several tokens per step: sources of draft tokens, and how many of them a step checks."""
