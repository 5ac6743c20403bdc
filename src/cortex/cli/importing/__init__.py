"""Configurations of other programs as files of ours."""
