"""Ollama's API: `chat` and `generate` are dialects, `models` are the bodies of its listings."""
