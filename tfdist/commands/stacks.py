"""Shows where the tasks of a running job are: who is behind, the last collectives of each task, and the stacks of its threads.

    tfdist stacks WORKDIR [--brief] [--last=5]   # exit code 1 if no task runs

WORKDIR is the work directory of `tfdist train`, or the folder of the logs of `tfdist launch`. The tasks of this host get a signal (SIGUSR2),
and those of other hosts find a request in the folder, if they share it. The tasks continue. Run it as the user who runs the job.

`python -m tfdist.commands.stacks` is the same command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from absl import flags

from tfdist.config import command_line
from tfdist.errors import ConfigError, format_value, printable_lines
from tfdist.runtime import files, flight_record, process_end, stacks
from tfdist.runtime.log import logger, print_always

_ANSWER_WITHIN = 3.0  # seconds; tasks of other hosts look each second
_SETTLED = 0.2  # seconds without a new line after which an answer is complete
_WAITS_AFTER = 1.0  # seconds in one collective after which a task is reported as waiting


@dataclasses.dataclass
class Task:
    """A task with a file of stacks.

    Attributes:
        header: The process.
        path: The file.
        size: The size of the file before the request.
        state: `"stopped"`, `"ended"`, `"no answer"`, or an empty text for a task that answers.
        text: The stacks that it has written.
        records: Its last collectives, the oldest first.
        before: The number of its last collective before the request.
    """

    header: stacks.Header
    path: pathlib.Path
    size: int
    state: str = ""
    text: str = ""
    records: list[flight_record.Record] = dataclasses.field(default_factory=list)
    before: int = 0

    @property
    def last(self) -> int:
        """The number of its last collective, 0 without one."""
        return self.records[-1].number if self.records else 0

    @property
    def place(self) -> str:
        """The line where it is, or an empty text."""
        *others, main = [*stacks.parse(self.text)] or [[]]
        return stacks.place(main, others)

    def read_records(self) -> None:
        """Reads its last collectives."""
        with contextlib.suppress(OSError):
            self.records = flight_record.read(self.path.with_suffix(flight_record.SUFFIX))

    def describe(self, now: float) -> str:
        """Returns its state in words."""
        running = [record for record in self.records if record.state == "running"]
        if self.state:
            return self.state
        if running and self.last == self.before and now - running[-1].begun > _WAITS_AFTER:
            return f"waits {now - running[0].begun:.0f} s in {running[0].kind}"
        if self.last > self.before:
            return "steps"
        return "runs, in no collective" if self.records else "runs"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 if no task runs, 2 for an invalid command line."""
    print_always()
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    flags.DEFINE_bool("brief", False, "Show no stacks.", flag_values=values)
    flags.DEFINE_integer(
        "last", 5, "Number of each task's last collectives to show.", 0, flight_record.LENGTH, flag_values=values
    )
    try:
        words = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if len(words) != 1:
            raise ConfigError(
                f"Usage: tfdist stacks WORKDIR [--brief] [--last=5]. Received: {' '.join(argv[1:]) or 'nothing'}"
            )
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
    print(printable_lines(report(tasks, time.time(), values.last, values.brief)), flush=True)
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
    """Asks tasks for their stacks, and reads the answers and collectives. Raises PermissionError if a task is another user's."""
    away = [task for task in tasks if not task.header.is_here]
    for task in tasks:
        task.read_records()
        task.before = task.last
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
        task.read_records()


def report(tasks: Sequence[Task], now: float, last: int, brief: bool) -> str:
    """Returns the text that the command prints.

    Args:
        tasks: The tasks, after `ask`.
        now: The time in seconds since the epoch.
        last: The number of collectives of each task to show.
        brief: Whether to leave out the stacks.
    """
    width = max(len(task.header.task) for task in tasks)
    lines = []
    for task in tasks:
        place = f" at {task.place}" if task.place else ""
        lines.append(f"{task.header.task:<{width}}  {task.describe(now)}{place}")
    if behind := behind_others(tasks):
        most = max(task.last for task in tasks)
        places = [
            f"{task.header.task} (collective {task.last} of {most})" + (f" at {task.place}" if task.place else "")
            for task in behind
        ]
        lines.append(f"behind: {', '.join(places)}")
    for task in tasks:
        if last and task.records:
            lines += ["", f"{task.header.task}: the last collectives"]
            lines += [_line(record, now) for record in task.records[-last:]]
        if not brief and task.text:
            lines += ["", f"{task.header.task}: the stacks of all threads", task.text.rstrip()]
    return "\n".join(lines)


def behind_others(tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks that have begun fewer collectives than others; empty if all are at the same one."""
    present = [task for task in tasks if task.state != "ended" and task.records]
    numbers = {task.last for task in present}
    return [task for task in present if task.last == min(numbers)] if len(numbers) > 1 else []


def _line(record: flight_record.Record, now: float) -> str:
    seconds = (record.ended or now) - record.begun
    size = f"{record.size:,} bytes"
    return f"  {record.number:>8}  {record.kind:<31}  {size:>18}  {record.state:<7}  {1000 * seconds:10.1f} ms  {now - record.begun:8.1f} s ago"


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
