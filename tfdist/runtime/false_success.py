"""Keeps a user's code from ending a training with exit code 0 before it has finished. No TensorFlow here.

`sys.exit(0)` in a callback, a task, a model or its data, or `os._exit(0)`, would end `tfdist train` as if it had trained.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from tfdist.runtime import exit_status
from tfdist.runtime.log import logger

_PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"
_QUITTERS = "sitebuiltins"  # has `exit()` and `quit()`, which call sys.exit


def run_to_the_end(train: Callable[[], object]) -> int:
    """Runs a training in this process.

    Args:
        train: Returns when the training has finished.

    Returns:
        0 once it has finished; where the user's code ends the process before, its exit code, or 1 in place of 0.

    Raises:
        SystemExit: The package itself ends the process, as after SIGTERM.
    """
    leave, process = os._exit, os.getpid()

    def leave_checked(code: int) -> None:
        caller = traceback.extract_stack()[-2]
        if os.getpid() == process and not _is_own(
            caller
        ):  # a child that is forked, as multiprocessing's, ends in this way
            code = _unfinished(caller, "os._exit", code)
        leave(code)

    os._exit = leave_checked  # type: ignore[assignment]
    try:
        train()
    except SystemExit as e:
        caller = [each for each in traceback.extract_tb(e.__traceback__) if _QUITTERS not in each.filename][-1]
        if _is_own(caller):
            raise
        return _unfinished(caller, "sys.exit", e.code)
    finally:
        os._exit = leave
    return 0


def _is_own(caller: traceback.FrameSummary) -> bool:
    return caller.filename.startswith(_PACKAGE)


def _unfinished(caller: traceback.FrameSummary, function: str, code: object) -> int:
    """Logs who has ended the training; returns the process's exit code."""
    logger.error(
        f"{caller.filename}:{caller.lineno} has called {function}({'' if code is None else repr(code)}) before the training has "
        "finished. To end a training early, set model.stop_training = True in a callback; for an error, raise one."
    )
    sys.stdout.flush()
    sys.stderr.flush()
    exit_status.exit_code = code if isinstance(code, int) and code else 1
    return exit_status.exit_code
