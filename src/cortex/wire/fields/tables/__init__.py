"""The treatment of every field by dialect: one table per dialect, for its parser and for the docs."""
