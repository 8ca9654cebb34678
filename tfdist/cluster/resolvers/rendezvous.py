"""Exchange of the ranks' addresses through a folder that all ranks share. No TensorFlow here.

Files of an earlier start may exist under the same name. So each process draws a random token, and all ranks confirm the addresses:

1. Each rank writes its address and its token.
2. Rank 0 writes the list of all addresses and tokens, under a new number whenever one of them changes.
3. A rank whose own token is in the list adds the list's number to its file. Rank 0 can know the token only from this start.
4. Once all ranks have added the number, rank 0 marks the list as agreed, and all ranks return its addresses.
"""

from __future__ import annotations

import contextlib
import errno
import json
import pathlib
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from tfdist.cluster.resolvers.shared_folder import SharedFolder, remove_old
from tfdist.errors import ClusterError
from tfdist.runtime.log import logger

_REPORT_EVERY = 10.0
_LAST_WAIT = 5.0  # seconds that rank 0 waits until the other ranks have read the list, before it removes the folder
_LIST = "list"
_OLD = 7 * 86400.0  # seconds after which a later start removes an earlier start's folder
_PREFIX = "tfdist-"
# Temporary errors that network storage reports for a file that has just been renamed.
_PASSING = (errno.ESTALE, errno.EIO, errno.EACCES, errno.EAGAIN)
_found: dict[tuple[Any, ...], list[str]] = {}  # addresses by arguments: a rank may call again when the others do not


def exchange(folder: str, job: str, rank: int, size: int, address: str, timeout: float) -> list[str]:
    """Returns the addresses of all ranks, in order, once all ranks have written and confirmed them.

    Args:
        folder: A folder that all ranks share. Each job creates a subfolder, which is removed at the end.
        job: The name of this job, equal on all ranks, and unique among jobs that run at the same time.

    Raises:
        ClusterError: A rank does not write its address in time, a file was not written by a process of this user, or the
            folder cannot be written.
    """
    asked = (folder, job, rank, size, address)
    if asked not in _found:
        name = f"{_PREFIX}{re.sub(r'[^A-Za-z0-9_.@-]', '_', job)}-{size}"
        if rank == 0:
            remove_old(pathlib.Path(folder), _PREFIX, _OLD)
        meeting = _Meeting(pathlib.Path(folder, name), rank, size, address)
        try:
            _found[asked] = meeting.hold(timeout)
        finally:
            meeting.leave()
    return list(_found[asked])


class _Meeting:
    def __init__(self, place: pathlib.Path, rank: int, size: int, address: str):
        self._folder = SharedFolder(place)
        self._rank = rank
        self._size = size
        self._entry = {"address": address, "token": uuid.uuid4().hex}
        self._entries: dict[int, dict[str, Any]] = {rank: self._entry}  # rank 0 adds those of the other ranks
        self._missing = ""  # the ranks or files that this rank waits for
        self._fault = ""  # why the last file could not be read
        self._number = ""  # of the list that rank 0 has written
        self._is_agreed = False

    def hold(self, timeout: float) -> list[str]:
        """Returns the addresses that all ranks have confirmed."""
        self._write(str(self._rank), self._entry)
        look = self._collect if self._rank == 0 else self._confirm
        began = reported = time.monotonic()
        while True:
            result = look()
            if result is not None:
                self._is_agreed = True
                return result
            now = time.monotonic()
            if now - began > timeout:
                fault = f" The last one could not be read: {self._fault}." if self._fault else ""
                raise ClusterError(
                    f"Waited {timeout:.0f} s for {self._missing} in {self._folder.place}.{fault} Are they started, and do all "
                    "hosts share this folder?"
                )
            if now - reported >= _REPORT_EVERY:
                logger.info(f"waiting for {self._missing} in {self._folder.place}")
                reported = now
            time.sleep(min(max(0.1, time.monotonic() - now), 1.0))

    def leave(self) -> None:
        """Removes this rank's file. The last rank, usually rank 0, also removes the folder."""
        with contextlib.suppress(OSError, ClusterError):
            until = time.monotonic() + _LAST_WAIT
            while self._is_agreed and self._rank == 0 and self._has_readers() and time.monotonic() < until:
                time.sleep(0.02)
            self._folder.remove(str(self._rank))
            failed_alone = self._rank == 0 and not self._is_agreed
            if failed_alone or (self._is_agreed and self._folder.names() == {_LIST}):
                self._folder.remove(_LIST)
            self._folder.rmdir()

    def _has_readers(self) -> bool:
        """Returns whether a rank has not read the agreed list yet. Afterwards a rank removes its file, or writes a new token if it starts again."""
        names = self._folder.names()
        entries = {rank: self._read(str(rank), _is_entry, rank) for rank in range(1, self._size) if str(rank) in names}
        return any(entry and entry["token"] == self._entries[rank]["token"] for rank, entry in entries.items())

    def _collect(self) -> list[str] | None:
        """Writes the list of addresses on rank 0; returns the addresses once all ranks have confirmed the list."""
        names = self._folder.names()
        changed = False
        for other in range(1, self._size):
            entry = self._read(str(other), _is_entry, other) if str(other) in names else None
            if entry is None:
                continue
            # Another token is of another start of that rank, so the other ranks must confirm again.
            if entry["token"] != self._entries.get(other, {}).get("token"):
                changed = True
            self._entries[other] = entry
        if len(self._entries) < self._size:
            self._missing = f"the addresses of rank {_join(set(range(self._size)) - self._entries.keys())}"
            return None
        entries = [self._entries[rank] for rank in range(self._size)]
        members = [[entry["address"], entry["token"]] for entry in entries]
        if changed or not self._number:
            self._number = uuid.uuid4().hex
            self._write(_LIST, {"number": self._number, "members": members, "agreed": False})
        late = {rank for rank in range(1, self._size) if entries[rank].get("confirms") != self._number}
        if late:
            self._missing = f"rank {_join(late)} to confirm the addresses (an earlier start may have left its file)"
            return None
        self._write(_LIST, {"number": self._number, "members": members, "agreed": True})
        return [entry["address"] for entry in entries]

    def _confirm(self) -> list[str] | None:
        """Confirms rank 0's list on another rank; returns its addresses once all ranks have confirmed it."""
        names = self._folder.names()
        absent = {rank for rank in range(self._size) if str(rank) not in names}
        self._missing = f"the addresses of rank {_join(absent)}" if absent else "the list of addresses by rank 0"
        address_list = self._read(_LIST, self._is_list, 0) if _LIST in names else None
        if address_list is None:
            return None
        members = address_list["members"]
        if members[self._rank] != [self._entry["address"], self._entry["token"]]:
            return None  # the list of an earlier start, or one with an earlier token of this rank
        if address_list["agreed"]:
            return [address for address, _ in members]
        self._missing = "all ranks to confirm the addresses"
        if self._entry.get("confirms") != address_list["number"]:
            self._entry["confirms"] = address_list["number"]
            self._write(str(self._rank), self._entry)
        return None

    def _is_list(self, content: Any) -> bool:
        match content:
            case {"number": str(), "agreed": bool(), "members": [*members]}:
                return len(members) == self._size and all(map(_is_member, members))
        return False

    def _write(self, name: str, content: dict[str, Any]) -> None:
        try:
            self._folder.write(name, json.dumps(content).encode())
        except OSError as e:
            raise ClusterError(
                f"rank {self._rank} cannot write its address to {self._folder.place}: {e.strerror or e}."
            ) from e

    def _read(self, name: str, is_valid: Callable[[Any], bool], rank: int) -> dict[str, Any] | None:
        """Returns the content of a file, or None if it does not exist or cannot be read yet."""
        try:
            text = self._folder.read(name)
            if not text:
                return None  # network storage may show a file before its content
            content = json.loads(text)
            if is_valid(content):
                return content
            raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as e:
            why = getattr(e, "strerror", None) or "its content is not a valid address file"
            if getattr(e, "errno", None) in _PASSING:
                self._fault = why
                return None
            raise ClusterError(
                f"the address of rank {rank} cannot be read from {self._folder.place / name}: {why}. "
                "Remove that folder, and start again."
            ) from e


def _is_entry(content: Any) -> bool:
    match content:
        case {"address": str(), "token": str()}:
            return True
    return False


def _is_member(content: Any) -> bool:
    """Returns whether an item of the list is the address and the token of a rank."""
    match content:
        case [str(), str()]:
            return True
    return False


def _join(ranks: set[int]) -> str:
    """Returns ranks as a list in words."""
    return ", ".join(map(str, sorted(ranks)))
