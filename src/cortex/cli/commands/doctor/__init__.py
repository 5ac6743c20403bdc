"""`cortex doctor` and its checks."""
