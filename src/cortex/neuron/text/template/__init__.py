"""Chat templates: from a request's conversation to the prompt."""
