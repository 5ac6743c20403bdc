"""How dialects read the fields of a request, and the table of fields of each dialect."""
