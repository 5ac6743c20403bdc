"""Families with recurrent layers, with and without experts."""
