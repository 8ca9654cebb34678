"""The settings of a task of `tfdist verify`, which a file in the folder of its arm holds. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import zlib
from typing import Any

VARIABLE = "TFDIST_VERIFY"  # the folder of the arm, in the environment of its tasks
_FILE = "settings.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of an arm.

    Attributes:
        folder: The folder of its records and backups.
        strategy: The strategy that replaces the script's; empty keeps the script's.
        devices: The number of virtual CPUs of each process; 0 keeps the script's.
        compression: The compressor that replaces the script's; empty keeps the script's.
        shard_optimizer: Whether to split the optimizer's state, also if the script does not.
        steps: The number of updates after which each `fit` ends.
        seed: The random seed, if the script sets none.
        save_freq: The number of steps between two backups; 0 keeps the script's.
        kill_at: The update after which the task `kill_task` kills itself, once; 0 means never.
        kill_task: The name of that task, such as `worker-1`.
    """

    folder: str
    strategy: str = ""
    devices: int = 0
    compression: str = ""
    shard_optimizer: bool = False
    steps: int = 20
    seed: int = 0
    save_freq: int = 0
    kill_at: int = 0
    kill_task: str = ""

    def write(self) -> None:
        """Writes the file that `current` reads, in the folder of the arm."""
        text = json.dumps(dataclasses.asdict(self))
        (pathlib.Path(self.folder) / _FILE).write_text(text)

    def strategy_fields(self, name: str) -> dict[str, Any]:
        """Returns the fields of a `StrategyConfig` with this name that the arm replaces."""
        fields: dict[str, Any] = {}
        if self.strategy not in ("", name):
            fields = {
                "name": self.strategy,
                "devices": "",
                "replicas": 0,
                "transport": "auto",
                "shard_optimizer": False,
            }
        if self.devices:
            fields |= {"devices": str(self.devices), "replicas": 0}
        if self.shard_optimizer:
            fields["shard_optimizer"] = True
        return fields

    @property
    def backups(self) -> str:
        """The folder of all backups of the arm."""
        return os.path.join(self.folder, "backups")

    def backup_folder(self, users: str | os.PathLike[str]) -> str:
        """Returns the folder that stands for a folder of backups of the user's."""
        return os.path.join(self.backups, f"{zlib.crc32(os.fspath(users).encode()):08x}")


def current() -> Settings | None:
    """Returns the settings of this process's arm; None outside of `tfdist verify`."""
    folder = os.environ.get(VARIABLE)
    return _read(folder) if folder else None


@functools.cache
def _read(folder: str) -> Settings:
    return Settings(**json.loads((pathlib.Path(folder) / _FILE).read_text()))
