"""The memory of a device and its host: how much there is, how it is planned, what lives in it."""
