"""Whether a person has stopped this process in a debugger. No TensorFlow here."""

from __future__ import annotations

import os
import sys
import threading
import traceback

# File and function in which a thread waits for the debugger's user: of pdb and its subclasses, as IPython's, and of debugpy.
_WAITS = {("pdb.py", "interaction"), ("pydevd.py", "do_wait_suspend")}


def in_debugger() -> bool:
    """Returns whether the main thread is stopped in pdb, IPython's debugger or debugpy now.

    debugpy stops all threads but those with the attributes `pydev_do_not_trace` and `is_pydev_daemon_thread`, so only such a
    thread can see that debugpy has stopped the main thread.
    """
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.StackSummary.extract(traceback.walk_stack(innermost), lookup_lines=False) if innermost else []
    return any((os.path.basename(frame.filename), frame.name) in _WAITS for frame in stack)
