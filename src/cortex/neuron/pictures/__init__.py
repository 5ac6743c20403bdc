"""Pictures in prompts: how many tokens one takes, and how its pixels are prepared. Imports no torch."""
