"""The names of each model family, as one descriptor each. Other packages read them through `registry`. Data only."""
