"""Views of running jobs, loads and measurements."""
