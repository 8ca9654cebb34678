"""A task of your own; `tfdist new-task my_task` has written it."""
