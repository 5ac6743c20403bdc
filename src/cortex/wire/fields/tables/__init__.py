"""What each dialect does with every field that clients send: one table per dialect, for its parser and for the docs."""
