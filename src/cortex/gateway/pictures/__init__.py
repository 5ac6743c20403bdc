"""Pictures that clients name by address: fetched where an operator allows it, and put into the request."""
