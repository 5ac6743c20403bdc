"""Requests whose content only the server of their model understands: all that is read of them is the model's name."""
