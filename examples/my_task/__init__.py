"""Your own task, to be copied."""
