"""What each model family calls things, a descriptor for each: everything else asks `registry`. Data only."""
