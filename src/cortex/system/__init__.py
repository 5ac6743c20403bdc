"""System services for programs: files, limits, exit codes, service managers, tasks, installed packages."""
