"""Files and batches: work that can wait, kept in the database and on disk, run where it slows no one down."""
