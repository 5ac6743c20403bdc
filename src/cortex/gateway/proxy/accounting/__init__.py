"""Records of a completed request: usage, counters, span, log line, activity."""
