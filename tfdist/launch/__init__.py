"""Starts, watches and restarts the tasks of this machine: `tfdist launch`. No TensorFlow here."""

from tfdist.launch.launcher import Launcher

__all__ = ["Launcher"]
