"""The commands of `cortex`, one file each."""
