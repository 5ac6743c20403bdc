"""From generated text to events: reasoning, stop strings, tool calls."""
