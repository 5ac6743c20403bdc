"""A codec per dialect: requests into the internal form, events and errors into the dialect's."""
