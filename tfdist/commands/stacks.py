"""Shows the stacks of the threads of a running job's tasks on this host, which continue.

    tfdist stacks WORKDIR   # exit code 1 if no task runs on this host

WORKDIR is the work directory of `tfdist train`, or the folder of the logs of `tfdist launch`. The tasks get a signal (SIGUSR2). Run it as
the user who runs the job.

`python -m tfdist.commands.stacks` is the same command.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.errors import ConfigError, format_value, printable_lines
from tfdist.runtime import files
from tfdist.runtime.end import process_end
from tfdist.runtime.log import logger, print_always
from tfdist.runtime.report import stacks

_ANSWER_WITHIN = 3.0  # seconds
_SETTLED = 0.2  # seconds without a new line after which an answer is complete: it has no mark at its end


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 if no task runs on this host, 2 for an invalid command line."""
    print_always()
    values = command_line.new_flags()
    try:
        words = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if len(words) != 1:
            raise ConfigError(f"Usage: tfdist stacks WORKDIR. Received: {' '.join(argv[1:]) or 'nothing'}")
        asked = [(task, path, size) for task, path, size in _tasks(words[0]) if task.ask()]
    except (ConfigError, flags.Error) as e:
        logger.error(e)
        return 2
    except PermissionError as e:
        logger.error(f"{e.filename}: {e.strerror}; run the command as the user who runs the job.")
        return 2
    if not asked:
        logger.error(f"no task of {format_value(words[0])} runs on this host; the logs there show how they ended.")
        return 1
    for task, path, size in asked:
        print(printable_lines(f"{task.task}{_answer(path, size)}"), flush=True)
    return 0


def _tasks(folder: str) -> list[tuple[stacks.Header, pathlib.Path, int]]:
    """Returns the tasks of this host whose files are in a folder or in its subfolder `logs`, with the file's path and size.

    Raises:
        ConfigError: There is no such folder, or it has no such file.
        PermissionError: The folder belongs to another user, who may not be signalled.
    """
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{format_value(folder)} is not a folder; give the work directory of a run, or the folder of its logs."
        )
    folders = (pathlib.Path(folder), pathlib.Path(folder, "logs"))
    paths = sorted(path for each in folders for path in each.glob(f"*{stacks.SUFFIX}"))
    if not paths:
        raise ConfigError(
            f"{format_value(folder)} holds no task's file of stacks: give the work directory of a run of tfdist train, or the folder of "
            "the logs of tfdist launch (--log_dir)."
        )
    tasks = []
    for path in paths:
        try:
            with files.open_regular(path) as file:
                header = stacks.Header.read(file)
                if header is None or not header.is_running():
                    continue
                if not header.is_ours(file):
                    raise PermissionError(1, f"{header.task} belongs to another user than this file", str(path))
                tasks.append((header, path, file.seek(0, os.SEEK_END)))
        except PermissionError:
            raise
        except OSError as e:
            logger.warning(f"{path} is skipped: {e.strerror}; remove it")
    return tasks


def _answer(path: pathlib.Path, size: int) -> str:
    """Returns the line where a task is, and the stacks that it writes behind `size` bytes of its file."""
    ends = time.monotonic() + _ANSWER_WITHIN
    text = before = ""
    while time.monotonic() < ends and not (text and text == before):
        time.sleep(_SETTLED)
        with files.open_regular(path) as file:
            file.seek(size)
            before, text = text, file.read(files.LARGEST).decode(errors="replace")
    *others, main = stacks.parse(text) or [[]]
    place = stacks.place(main, others)
    return f"{place and f' at {place}'}\n{text or 'no answer: it is stopped, or ends'}"


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
