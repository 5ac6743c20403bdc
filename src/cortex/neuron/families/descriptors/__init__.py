"""A file for each maker of models, or for several with one family each."""
