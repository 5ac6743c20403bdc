"""Requests that only the server of their model understands: speech, images, and everything below `/upstream/`."""
