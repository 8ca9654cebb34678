"""The end of this process: exit codes, signals, and one list of the functions that run at the end."""
