"""Checks of this machine and environment: a file for each subject, whose `check(environ)` yields findings. No TensorFlow in this process."""
