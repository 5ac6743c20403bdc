"""One file per maker of models, or for several makers with one family each."""
