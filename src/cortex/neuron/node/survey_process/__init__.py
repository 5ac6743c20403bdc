"""A process with limits that reads the files of models which nobody has vouched for."""
