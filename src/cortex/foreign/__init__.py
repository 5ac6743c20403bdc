"""Servers that are not ours and speak OpenAI's API: what they are sent, and how their responses are read."""
