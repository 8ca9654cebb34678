"""Starts, watches and restarts the tasks of this machine: `python -m tfdist.launch`. No TensorFlow here."""
