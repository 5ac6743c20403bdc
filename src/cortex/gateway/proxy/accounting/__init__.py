"""What is recorded of a request when it has ended: usage, counters, span, log line, activity."""
