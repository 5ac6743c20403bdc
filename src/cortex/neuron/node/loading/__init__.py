"""From a model's name to a loaded instance: files, checks, forecast, device, load."""
