"""Lists the backups of a run, whole or damaged, and exports a model from a backup. Nothing is written to the folder.

    tfdist backup show DIR [--json]                 # exit code 1 if no backup is whole
    tfdist backup export DIR OUT.keras [--step=N]   # the model of the newest whole backup, or of the backup at step N

DIR is the run's work directory, or the folder of its backups; both may be URLs. All checksums are verified, so every file is read to its end.
`export` builds the model from the run's config.json, so it works only for runs of `tfdist train`. The exported optimizer starts from its initial state.

`python -m tfdist.backup` is the same command.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from tfdist.compat import keras_backend
from tfdist.config import command_line, files
from tfdist.errors import BackupError, ConfigError, describe_error, format_value, unknown_name_message
from tfdist.runtime import tensorflow_log
from tfdist.runtime.end import process_end
from tfdist.runtime.files import WriteError
from tfdist.runtime.folders import storage
from tfdist.runtime.log import logger, print_always

if TYPE_CHECKING:
    from tfdist.backup import listing

COMMANDS = ("show", "export")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 2 for an invalid command line, 1 if no backup is whole."""
    print_always()
    tensorflow_log.set_level()
    values = command_line.new_flags()
    flags.DEFINE_bool("json", False, "Print JSON, for `show`.", flag_values=values)
    flags.DEFINE_integer(
        "step",
        None,
        "The step of the backup to export. Default: the newest whole backup.",
        lower_bound=0,
        flag_values=values,
    )
    try:
        words = command_line.read_flags(values, argv)[1:]
        if values.help:
            print(f"{__doc__}\n{command_line.help_text(values)}")
            return 0
        if words and words[0] not in COMMANDS:
            raise ConfigError(unknown_name_message("command", words[0], COMMANDS))
        if [len(words), *words[:1]] not in ([2, "show"], [3, "export"]):
            raise ConfigError(
                "Usage: tfdist backup show DIR [--json], or tfdist backup export DIR OUT.keras [--step=N]. "
                f"Received: {' '.join(argv[1:]) or 'nothing'}"
            )
        try:
            folder, config = find_backups(words[1])
            if os.path.isdir(folder):
                os.listdir(folder)
        except storage.StorageError as e:
            raise ConfigError(f"{storage.reason(e)}.") from None
        except PermissionError as e:
            raise ConfigError(
                f"{format_value(words[1])} cannot be read: {e.strerror}; read it as the user who ran it."
            ) from e
        if words[0] == "export":
            return _export(folder, config, words[2], values.step)
        return _show(folder, values.json)
    except (ConfigError, flags.Error) as e:
        logger.error(e)
        return 2
    except (BackupError, WriteError) as e:
        logger.error(e)
        return 1


def find_backups(path: str) -> tuple[str, str | None]:
    """Returns the folder of a run's backups, and the run's `config.json` or None.

    Args:
        path: The run's work directory, or the folder of the backups; a path or a URL.

    Raises:
        ConfigError: The folder does not exist, or its `config.json` cannot be read.
        StorageError: The storage of the URL cannot be read.
    """
    faults = list(storage.faults("DIR", path))
    if faults:
        raise ConfigError(faults)
    remote = storage.is_url(path)
    if remote:
        folder = path.rstrip("/")
        parent = os.path.dirname(folder)
    elif path and os.path.isdir(path):
        folder = str(pathlib.Path(path))
        parent = os.path.dirname(os.path.abspath(folder))
    else:
        raise ConfigError(
            f"{format_value(path)} is not a folder; give a run's work directory, or the folder of its backups."
        )
    for workdir in (folder, parent):
        config = os.path.join(workdir, "config.json")
        if storage.is_url(workdir) != remote or not storage.is_file(config):  # a bucket has no parent
            continue
        backups = _backup_dir(config) or os.path.join(workdir, "backup")
        if workdir == folder or _real(backups) == _real(folder):
            return backups, config
    inside = os.path.join(folder, "backup")  # the folder of a script's Trainer
    if storage.is_folder(inside) and not _has_backups(folder):
        return inside, None
    return folder, None


def _real(folder: str) -> str:
    if storage.is_url(folder):
        return folder.rstrip("/")
    return os.path.realpath(folder)


def _has_backups(folder: str) -> bool:
    try:
        return any(name.startswith("step-") for name in storage.list_folder(folder))
    except FileNotFoundError:
        return False


def _backup_dir(config: str) -> str:
    try:
        return str(json.loads(files.read_config(config))["backup"]["dir"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{config} is not a file of a run: {describe_error(e)}") from None


def _show(folder: str, as_json: bool) -> int:
    backups: list[listing.Listed] = []
    if _has_backups(folder):  # otherwise TensorFlow need not be loaded
        from tfdist.backup import listing

        backups = listing.read(folder)
    if as_json:
        print(json.dumps({"folder": folder, "backups": [backup.described() for backup in backups]}))
    elif not backups:
        raise BackupError(f"{folder!r} has no backup: the run has not saved any yet, or has ended and removed them.")
    else:
        print(f"{folder}\n{listing.table(backups)}")
    return 0 if any(backup.state == "whole" for backup in backups) else 1


def _export(folder: str, config: str | None, path: str, step: int | None) -> int:
    if not path.endswith(".keras"):
        raise ConfigError(f"The model's file must end in '.keras'. Received: {format_value(path)}.")
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; choose another name for the model.")
    if config is None:
        raise ConfigError(
            f"{folder!r} has no config.json of a run beside it, which is needed to build the model. Give the work directory of a "
            "run of tfdist train; for a script, build the model in it, and call fit with the same backup_dir."
        )
    keras_backend.check()
    with tensorflow_log.filtered():
        from tfdist.training import backup_export

    backup = backup_export.export(files.load(config), folder, path, step)
    print(f"{path}: the model of {backup}")
    return 0


if __name__ == "__main__":
    sys.exit(process_end.run_command(main, sys.argv))
