"""Foreign servers that speak OpenAI's API: requests to them, and their responses."""
