"""Files and batches: work that can wait, kept in the database and on disk, run where nobody else is slowed down."""
