"""Requests whose content only the server of their model understands; only the model's name is read."""
