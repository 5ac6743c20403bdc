"""Pictures of a conversation: their files in a request, what the header of a file says, and their limits."""
