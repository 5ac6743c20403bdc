"""The families with experts."""
