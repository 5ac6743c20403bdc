"""From a model's name to a loaded instance: files, preflight, memory forecast, device, weights."""
