"""Whether a person has stopped this process in a debugger. No TensorFlow here."""

from __future__ import annotations

import sys
import threading

# Module and function in which a thread waits for the debugger's user: pdb and its subclasses, as IPython's; debugpy.
_WAITS = {("pdb", "interaction"), ("pydevd", "do_wait_suspend")}


def in_debugger() -> bool:
    """Returns whether the main thread is stopped in pdb, IPython's debugger or debugpy now.

    debugpy stops all threads but those with the attributes `pydev_do_not_trace` and `is_pydev_daemon_thread`, so only such a
    thread can see that debugpy has stopped the main thread.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITS:
            return True
        frame = frame.f_back
    return False
