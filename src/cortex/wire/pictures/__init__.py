"""Pictures of a conversation: their files in a request, the headers of files, and limits."""
