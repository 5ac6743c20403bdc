"""What operators order by hand, and what of it outlives a restart."""
