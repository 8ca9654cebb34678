"""Your own task, created by `tfdist new-task my_task`."""
