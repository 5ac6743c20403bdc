"""The families whose layers have attention and a feed-forward block, a file for each shape."""
