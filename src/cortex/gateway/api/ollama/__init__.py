"""Ollama's API of the gateway, besides the dialects themselves."""
