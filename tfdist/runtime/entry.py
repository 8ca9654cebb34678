"""How a command ends whose output nobody reads, or that is ended by Ctrl-C. No TensorFlow here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from tfdist.runtime import interrupt
from tfdist.runtime.log import logger


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Returns a command's exit code; after Ctrl-C, or where nobody reads its output (`--help | head`), a shell's for that signal."""
    try:
        code = main(argv)
        if sys.stdout is not None:  # Python's word for one that was closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt:
        logger.error(interrupt.MESSAGE)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
