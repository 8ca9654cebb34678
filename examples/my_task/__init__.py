"""A task of one's own; `tfdist new-task my_task` has written it."""
