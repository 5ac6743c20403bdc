"""A model that is divided among several devices: its communicator, and the ranks that follow the first one."""
