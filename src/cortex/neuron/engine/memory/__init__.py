"""The memory of a device and its host: its size, plan and contents."""
