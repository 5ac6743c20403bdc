"""A process with limits that reads the untrusted files of models."""
