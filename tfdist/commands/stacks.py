"""Shows where the tasks of a running job are, which of them the others wait for, and the stacks of their threads.

    tfdist stacks WORKDIR [--brief]   # exit code 1 if no task runs

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

from absl import flags

from tfdist.config import command_line
from tfdist.errors import ConfigError, format_value, printable_lines
from tfdist.runtime import files, process_end, stacks
from tfdist.runtime.log import logger, print_always

_ANSWER_WITHIN = 3.0  # seconds; tasks of other hosts look each second
_SETTLED = 0.2  # seconds without a new line after which an answer is complete


@dataclasses.dataclass
class Task:
    """A task with a file of stacks.

    Attributes:
        header: The process.
        path: The file.
        size: The size of the file before the request.
        state: `"stopped"`, `"ended"`, `"no answer"`, or an empty text for a task that answers.
        text: The stacks that it has written.
    """

    header: stacks.Header
    path: pathlib.Path
    size: int
    state: str = ""
    text: str = ""

    @property
    def waits(self) -> bool:
        """Whether its main thread is in tfdist's code: in a step or an exchange, where it waits for the other tasks."""
        *_, main = [*stacks.parse(self.text)] or [[]]
        return stacks.is_in_package(main) and self.header.activity not in ("saving", "building", "compiling")

    @property
    def place(self) -> str:
        """The line where it is, or an empty text."""
        *others, main = [*stacks.parse(self.text)] or [[]]
        return stacks.place(main, others)

    def describe(self) -> str:
        """Returns its state in words."""
        if self.state:
            return self.state
        return "waits for others" if self.waits else self.header.activity or "runs"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 if no task runs, 2 for an invalid command line."""
    print_always()
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    flags.DEFINE_bool("brief", False, "Show no stacks.", flag_values=values)
    try:
        words = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if len(words) != 1:
            raise ConfigError(f"Usage: tfdist stacks WORKDIR [--brief]. Received: {' '.join(argv[1:]) or 'nothing'}")
        tasks = find(words[0])
        if not tasks:
            raise ConfigError(
                f"{format_value(words[0])} holds no task's file of stacks: give the work directory of a run of tfdist train, or the folder of "
                "the logs of tfdist launch (--log_dir)."
            )
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
        ConfigError: There is no such folder.
        PermissionError: The folder belongs to another user, who may not be signalled.
    """
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{format_value(folder)} is not a folder; give the work directory of a run, or the folder of its logs."
        )
    tasks = []
    for path in sorted(
        [*pathlib.Path(folder).glob(f"*{stacks.SUFFIX}"), *pathlib.Path(folder, "logs").glob(f"*{stacks.SUFFIX}")]
    ):
        if (header := stacks.Header.read(path)) is None:
            continue
        if header.is_running() and not header.is_ours(path):
            raise PermissionError(1, f"{header.task} belongs to another user than this file", str(path))
        tasks.append(Task(header, path, path.stat().st_size))
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
    for folder in {task.path.parent for task in away if task.state != "ended"}:
        files.write_file(folder / stacks.REQUEST, f"{os.getpid()} {time.time()}\n".encode())
    ends, asked = time.monotonic() + _ANSWER_WITHIN, [task for task in tasks if not task.state]
    grown: dict[int, tuple[int, float]] = {}
    while time.monotonic() < ends and asked:
        time.sleep(0.05)
        for task in [*asked]:
            size, since = task.path.stat().st_size, time.monotonic()
            if grown.get(id(task), (task.size, 0))[0] != size:
                grown[id(task)] = size, since
            elif size > task.size and since - grown[id(task)][1] > _SETTLED:
                asked.remove(task)
    for task in tasks:
        with open(task.path, "rb") as file:
            file.seek(task.size)
            task.text = file.read().decode(errors="replace")
        if not task.state and not task.text:
            task.state = "no answer" + ("" if task.header.is_here else f" from host {task.header.host}")


def report(tasks: Sequence[Task], brief: bool) -> str:
    """Returns the text that the command prints.

    Args:
        tasks: The tasks, after `ask`.
        brief: Whether to leave out the stacks.
    """
    width = max(len(task.header.task) for task in tasks)
    lines = [f"{task.header.task:<{width}}  {task.describe()}{_at(task)}" for task in tasks]
    behind = [task for task in tasks if not task.waits and task.state != "ended"]
    if behind and any(task.waits for task in tasks):
        lines.append(f"behind: {', '.join(task.header.task + _at(task) for task in behind)}")
    for task in tasks:
        if not brief and task.text:
            lines += ["", f"{task.header.task}: the stacks of all threads", task.text.rstrip()]
    return "\n".join(lines)


def _at(task: Task) -> str:
    return f" at {task.place}" if task.place else ""


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
