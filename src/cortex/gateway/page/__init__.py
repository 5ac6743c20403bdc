"""The page: the gateway's web interface. Its files are in `files/`; this package serves them and signs people in."""
