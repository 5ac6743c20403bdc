"""Tool calls in a model's output: one reader per syntax, and a scanner that finds them in the stream."""
