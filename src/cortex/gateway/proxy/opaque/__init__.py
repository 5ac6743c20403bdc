"""Requests that only the server of their model understands: speech, images, and all that is below `/upstream/`."""
