"""The gateway's own records of the last hour and the last day."""
