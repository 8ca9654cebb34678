"""The exit code that this process will end with. No TensorFlow here."""

from __future__ import annotations

import sys

# The exit code of a task that has been told to go, has saved what it had, and wants to be started again: EX_TEMPFAIL.
PREEMPTED = 75
# The exit code of a faulty command line or configuration, which no restart mends.
FAULTY_CONFIG = 2

# With which this process is going to end, as far as that is known; for those who serve it.
exit_code = 0
amid_training = False  # whether sys.exit was called within a training


def expected_exit_code() -> int:
    """Returns the exit code with which this process, whose end has begun, ends: `exit_code`, or 1 after an exception."""
    return exit_code or int(getattr(sys, "last_value", None) is not None)
