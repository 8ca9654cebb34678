"""The supervisor of this machine's tasks, which starts, watches and restarts them: `tfdist launch`. No TensorFlow here."""

from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

__all__ = ["Launcher", "Options"]
