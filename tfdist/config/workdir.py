"""The work directory of a run. No TensorFlow here."""

from __future__ import annotations

import pathlib
import tempfile

from tfdist.errors import ConfigError, format_value


def make_workdir(workdir: pathlib.Path) -> None:
    """Makes the work directory.

    Args:
        workdir: The folder.

    Raises:
        ConfigError: The folder cannot be made, or nothing can be written to it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"workdir must be a folder that can be written to. Received: {format_value(str(workdir))} ({why})."
        ) from None
