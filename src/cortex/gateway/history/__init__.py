"""The last hour and the last day of the gateway, kept by itself."""
