"""Tool calls in a model's output: one reader per syntax, one scanner that finds them in the stream."""
