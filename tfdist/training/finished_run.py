"""`FinishedRun`: a finished run in the work directory of a new one."""

from __future__ import annotations

import os
from typing import Any

from tfdist.config import TrainConfig
from tfdist.errors import ConfigError, format_value
from tfdist.runtime.folders import finished_training, storage
from tfdist.runtime.folders.workdir import Workdir, read_json
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress

# Set for the tasks that `tfdist train` starts: their cluster's source. The command prints the results, not the tasks.
SOURCE = "TFDIST_SOURCE"


class FinishedRun:
    """The finished run in a work directory, if any, which a new run in the directory would replace.

    A run has finished once its `summary.json` exists. If there are backups, too, which no run has marked as finished, the new run continues
    from them: a later run was interrupted, or the finished run was killed before it had written all files. With
    `backup.delete_checkpoint=false` the finished run's backups stay, and a run with more epochs continues from them.

    Args:
        config: The configuration of the new run.
        workdir: The work directory.
        overwrite: Whether the new run may replace the finished run.
    """

    def __init__(self, config: TrainConfig, workdir: Workdir, overwrite: bool):
        self._config = config
        self._workdir = workdir
        self._overwrite = overwrite
        self._backups = config.backup.dir or os.path.join(workdir, "backup")
        self._summary: dict[str, Any] | None = None
        self._kept: list[dict[str, Any]] = []
        # A task that a supervisor started belongs to the run in this directory, so it replaces nothing.
        if SOURCE in os.environ or progress.restarts():
            return
        self._summary = workdir.read_json("summary.json")
        if self._summary is None or config.backup.save_freq == "never":
            return
        try:
            if finished_training.is_of_another_run(self._backups):  # its launcher was killed before it removed them
                return
            names = [name for name in storage.list_folder(self._backups) if name.startswith("step-")]
            manifests = [read_json(os.path.join(self._backups, name, "manifest.json")) for name in names]
            self._kept = [body for body in manifests if body is not None]
        except (OSError, ValueError):  # the folder does not exist
            pass

    def check(self) -> None:
        """Raises a ConfigError if the new run would replace a finished run without `overwrite`."""
        if self._overwrite or not self._is_replaced():
            return
        how_to_continue = (
            f"begin in another --workdir with --config.initial_weights={self._workdir}/model.keras; its backups were removed (with "
            "--config.backup.delete_checkpoint=false they stay, and a higher --config.epochs continues from them)"
        )
        if self._kept:
            how_to_continue = "raise --config.epochs"
        raise ConfigError(
            f"workdir {format_value(str(self._workdir))} holds a finished run. Choose another --workdir; or train again from the beginning "
            f"with --overwrite, which replaces model.keras at its end; or, to train further, {how_to_continue}."
        )

    def replace(self) -> None:
        """Logs that the finished run will be replaced, and removes its backups; does nothing if the finished run is not replaced."""
        if not self._is_replaced():
            return
        logger.info(
            f"{self._workdir} holds a finished run; training again from the beginning. Its model.keras and summary.json stay until this "
            "run has finished, which then replaces them"
        )
        if self._kept:
            finished_training.remove_backups(self._backups)

    def _is_replaced(self) -> bool:
        if self._summary is None or not self._kept:
            return self._summary is not None
        is_own = all(body.get("training") == self._summary.get("training") for body in self._kept)
        further = max(_number(body.get("position"), "step") for body in self._kept) > _number(self._summary, "steps")
        if not is_own or self._config.backup.delete_checkpoint or further:
            return False
        return self._overwrite or self._config.epochs <= _number(self._summary, "epochs")


def _number(body: Any, name: str) -> int:
    # The files may be damaged, or another program's.
    if isinstance(body, dict) and isinstance(body.get(name), int):
        return int(body[name])
    return 0
