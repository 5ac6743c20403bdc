"""Device workers: one process per device, its job channel and its supervision."""
