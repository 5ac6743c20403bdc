"""What commands show of jobs, loads and responses while they run."""
