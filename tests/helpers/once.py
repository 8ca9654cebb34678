"""Does a piece of work once in a test run, whichever of its processes asks for it first; the others wait, and take what came of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence


class Once:
    """Folders that are filled once in a test run."""

    def __init__(self, root: pathlib.Path, limit: float = 900):
        """Makes one.

        Args:
            root: A folder that all processes of the run share.
            limit: How many seconds to wait for another process, at most.
        """
        self._root = root
        self._limit = limit

    def folder(self, name: str, fill: Callable[[pathlib.Path], object]) -> pathlib.Path:
        """Returns a folder that has been filled. If filling it failed, it fails again for all who ask.

        Args:
            name: What is in it; equal names mean equal work.
            fill: Fills the empty folder that it is given. A process that is killed meanwhile leaves the work to the next one.
        """
        # Short, as programs put sockets below, and readable.
        words = re.sub(r"[^\w.]+", "-", name)[:40]
        short = f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
        path, end = self._root / short, self._root / f"{short}.end"
        with self._locked(self._root / f"{short}.lock", name):
            if not end.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                try:
                    fill(path)
                except BaseException:
                    _write(end, traceback.format_exc())
                    raise
                _write(end, None)
            error = json.loads(end.read_text())
        assert error is None, f"{name} failed before:\n{error}"
        return path

    def groups(self, name: str, keys: Sequence[str]) -> list[list[str]]:
        """Returns groups of keys that hold all of `keys`. A key stays in the group of the first call that had it.

        So pieces of work that overlap share what they have in common: the first one does it, the second one the rest.
        """
        path = self._root / f"{name}.groups"
        with self._locked(self._root / f"{name}.lock", name):
            groups: list[list[str]] = json.loads(path.read_text()) if path.exists() else []
            if new := [key for key in keys if not any(key in group for group in groups)]:
                groups.append(new)
                _write(path, groups)
        return [group for group in groups if not set(group).isdisjoint(keys)]

    @contextlib.contextmanager
    def _locked(self, path: pathlib.Path, name: str) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            deadline = time.monotonic() + self._limit
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"{name}: another process has not ended it in {self._limit} seconds"
                        ) from None
                    time.sleep(0.05)
            yield


def _write(path: pathlib.Path, content: list[list[str]] | str | None) -> None:
    """Writes a file that is there with all its content, or not at all."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content))
    part.rename(path)
