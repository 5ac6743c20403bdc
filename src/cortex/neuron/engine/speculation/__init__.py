"""Several tokens per step: where draft tokens come from, and how many of them a step checks."""
