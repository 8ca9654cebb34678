"""A network laboratory: hosts of one machine, on links of a chosen rate. `python -m tools.netlab`."""

from tools.netlab.goodput import goodput
from tools.netlab.lab import Lab, missing

__all__ = ["Lab", "goodput", "missing"]
