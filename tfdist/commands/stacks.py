"""Shows where the tasks of a running job are, which of them the others wait for, and the stacks of their threads.

    tfdist stacks WORKDIR [--brief]   # exit code 1 if no task runs
    tfdist stacks WORKDIR --serve[=PORT]   # a page that shows the same, refreshed each 5 s, until Ctrl-C

WORKDIR is the work directory of `tfdist train`, or the folder of the logs of `tfdist launch`. The tasks of this host get a signal (SIGUSR2),
and those of other hosts find a request in the folder, if they share it. The tasks continue. Run it as the user who runs the job.

`python -m tfdist.commands.stacks` is the same command.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from absl import flags

from tfdist.commands import stacks_page
from tfdist.config import command_line
from tfdist.errors import ConfigError, format_value, printable_lines
from tfdist.runtime import files
from tfdist.runtime.end import process_end
from tfdist.runtime.log import logger, print_always
from tfdist.runtime.report import stacks

_ANSWER_WITHIN = 3.0  # seconds; tasks of other hosts look each second
_SETTLED = 0.2  # seconds without a new line after which an answer is complete


@dataclasses.dataclass
class Task:
    """A task with a file of stacks.

    Attributes:
        header: The process.
        file: The file.
        size: The size of the file before the request.
        state: `"stopped"`, `"ended"`, `"no answer"`, or an empty text for a task that answers.
        text: The stacks that it has written.
    """

    header: stacks.Header
    file: BinaryIO
    size: int
    state: str = ""
    text: str = ""

    @property
    def waits(self) -> bool:
        """Whether its main thread is in tfdist's code: in a step or an exchange, where it waits for the other tasks."""
        main = self._stacks[-1]
        return stacks.is_in_package(main) and self.header.activity not in ("saving", "building", "compiling")

    @property
    def place(self) -> str:
        """The line where it is, or an empty text."""
        *others, main = self._stacks
        return stacks.place(main, others)

    @property
    def _stacks(self) -> list[stacks.Stack]:
        """The stacks of its threads, that of the main thread last; an empty one if it has written none."""
        return list(stacks.parse(self.text)) or [[]]

    def describe(self) -> str:
        """Returns its state in words."""
        if self.state:
            return self.state
        if self.waits:
            return "waits for others"
        return self.header.activity or "runs"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 if no task runs, 2 for an invalid command line."""
    print_always()
    values = command_line.new_flags()
    flags.DEFINE_bool("brief", False, "Show no stacks.", flag_values=values)
    flags.DEFINE_integer(
        "serve",
        None,
        "Serve a page at this port of 127.0.0.1; without a number at a free port.",
        lower_bound=0,
        upper_bound=65535,
        flag_values=values,
    )
    argv = ["--serve=0" if each == "--serve" else each for each in argv]
    try:
        words = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if len(words) != 1:
            raise ConfigError(
                f"Usage: tfdist stacks WORKDIR [--brief] [--serve=PORT]. Received: {' '.join(argv[1:]) or 'nothing'}"
            )
        tasks = find(words[0])
        if values.serve is not None:
            stacks_page.serve(values.serve, lambda: _page_text(words[0], values.brief))
            return 0
        ask(tasks)
    except (ConfigError, flags.Error) as e:
        logger.error(e)
        return 2
    except PermissionError as e:
        logger.error(f"{e.filename}: {e.strerror}; run the command as the user who runs the job.")
        return 2
    if all(task.state == "ended" for task in tasks):
        logger.error(f"no task of {format_value(words[0])} runs; the logs there show how they ended.")
        return 1
    print(printable_lines(report(tasks, values.brief)), flush=True)
    return 0


def find(folder: str) -> list[Task]:
    """Returns the tasks whose files are in a folder, or in its subfolder `logs`.

    Raises:
        ConfigError: There is no such folder, or it has no such file.
        PermissionError: The folder belongs to another user, who may not be signalled.
    """
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{format_value(folder)} is not a folder; give the work directory of a run, or the folder of its logs."
        )
    tasks = []
    folders = (pathlib.Path(folder), pathlib.Path(folder, "logs"))
    for path in sorted(path for each in folders for path in each.glob(f"*{stacks.SUFFIX}")):
        try:
            file = files.open_regular(path)
        except PermissionError:
            raise
        except OSError as e:
            logger.warning(f"{path} is skipped: {e.strerror}; remove it")
            continue
        header = stacks.Header.read(file)
        if header is None:
            file.close()
            continue
        if header.is_running() and not header.is_ours(file):
            raise PermissionError(1, f"{header.task} belongs to another user than this file", str(path))
        tasks.append(Task(header, file, _size(file)))
    if not tasks:
        raise ConfigError(
            f"{format_value(folder)} holds no task's file of stacks: give the work directory of a run of tfdist train, or the folder of "
            "the logs of tfdist launch (--log_dir)."
        )
    return tasks


def ask(tasks: Sequence[Task]) -> None:
    """Asks tasks for their stacks, and reads the answers. Raises PermissionError if a task is another user's."""
    away = [task for task in tasks if not task.header.is_here]
    for task in tasks:
        if task.header.is_here and not task.header.is_running():
            task.state = "ended"
        elif task.header.is_here and task.header.is_stopped():
            task.state = "stopped"
        elif task.header.is_here and not task.header.ask():
            away.append(task)
    for folder in {os.path.dirname(task.file.name) for task in away if task.state != "ended"}:
        files.write_file(os.path.join(folder, stacks.REQUEST), f"{os.getpid()} {time.time()}\n".encode())
    ends = time.monotonic() + _ANSWER_WITHIN
    asked = [task for task in tasks if not task.state]
    # For each task, the last size of its file, and since when. An answer has no mark at its end.
    grown: dict[int, tuple[int, float]] = {}
    while time.monotonic() < ends and asked:
        time.sleep(0.05)
        for task in [*asked]:
            size = _size(task.file)
            now = time.monotonic()
            last_size, since = grown.get(id(task), (task.size, now))
            if size != last_size:
                grown[id(task)] = size, now
            elif size > task.size and now - since > _SETTLED:
                asked.remove(task)
    for task in tasks:
        with task.file:
            task.file.seek(task.size)
            task.text = task.file.read(files.LARGEST).decode(errors="replace")
        if not task.state and not task.text:
            task.state = "no answer"
            if not task.header.is_here:
                task.state += f" from host {task.header.host}"


def report(tasks: Sequence[Task], brief: bool) -> str:
    """Returns the text that the command prints about tasks that `ask` has asked; without the stacks if `brief`."""
    width = max(len(task.header.task) for task in tasks)
    lines = [f"{task.header.task:<{width}}  {task.describe()}{_at(task)}" for task in tasks]
    behind = [task for task in tasks if not task.waits and task.state != "ended"]
    if behind and any(task.waits for task in tasks):
        lines.append(f"behind: {', '.join(task.header.task + _at(task) for task in behind)}")
    for task in tasks:
        if not brief and task.text:
            lines += ["", f"{task.header.task}: the stacks of all threads", task.text.rstrip()]
    return "\n".join(lines)


def _page_text(folder: str, brief: bool) -> str:
    """Returns the text of the page: the report, or why there is none, as when the tasks have ended."""
    try:
        tasks = find(folder)
        ask(tasks)
    except (ConfigError, PermissionError) as e:
        return str(e)
    return report(tasks, brief)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _at(task: Task) -> str:
    place = task.place
    if not place:
        return ""
    return f" at {place}"


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
