"""What programs need of the system: files, limits, exit codes, service managers, tasks, what is installed."""
