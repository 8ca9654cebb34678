"""The progress of a training, for the status of its TrainJob: posted to the server of Kubeflow Trainer (kubeflow/trainer#2779).

Kubeflow Trainer sets the address of its server, and the paths of a certificate and a token, if its feature gate `TrainJobStatus` is on.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from tfdist.runtime.files import read_file, warning_once
from tfdist.runtime.report import progress

_PREFIXES = ("KUBEFLOW_TRAINER_SERVER_", "KUBEFLOW_TRAINER_STATUS_")  # the second one is that of drafts
POST_EVERY = 10.0  # seconds between two posts
_TIMEOUT = 5.0  # of a post
_LONGEST = 64  # of the name of a metric


@contextlib.contextmanager
def posting() -> Iterator[None]:
    """Posts the progress of this process's training within the context, if Kubeflow Trainer asks for it. Call it on the chief."""
    prefix = next((prefix for prefix in _PREFIXES if os.environ.get(f"{prefix}URL")), None)
    if prefix is None:
        yield
        return
    ended = threading.Event()
    # A thread, because a step must not wait for the server.
    thread = threading.Thread(target=_post_until, args=(prefix, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_TIMEOUT)


def _post_until(prefix: str, ended: threading.Event) -> None:
    """Posts regularly, and once at the end."""
    pace = _Pace()
    is_last = False
    while not is_last:
        is_last = ended.wait(POST_EVERY)
        with warning_once(os.environ[f"{prefix}URL"], "and the TrainJob does not show its progress"):
            _post(prefix, pace.status(progress.own()))


class _Pace:
    """The remaining time, at the mean pace since the first step that was seen, because that one includes a compilation."""

    def __init__(self) -> None:
        self._began = 0.0
        self._first = 0

    def status(self, record: progress.Progress) -> dict[str, Any]:
        """Returns the `trainerStatus` of a record; unknown values are absent."""
        now = time.monotonic()
        values = {"epoch": str(record.epoch), "step": str(record.done), **record.metrics}
        status: dict[str, Any] = {
            "metrics": [{"name": name[:_LONGEST], "value": value} for name, value in values.items()],
            "lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        # The record may still be that of the fit before.
        if not self._first or record.done < self._first:
            self._began = now
            self._first = record.done
        if not record.total:
            return status
        status["progressPercentage"] = min(100, 100 * record.done // record.total)
        if record.done > self._first:
            seconds = (now - self._began) * (record.total - record.done) / (record.done - self._first)
            status["estimatedRemainingSeconds"] = max(0, round(seconds))
        return status


def _post(prefix: str, status: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    token = os.environ.get(f"{prefix}TOKEN")
    if token:  # a file that is replaced before the token expires
        headers["Authorization"] = f"Bearer {read_file(token).decode().strip()}"
    context = ssl.create_default_context(cafile=os.environ.get(f"{prefix}CA_CERT"))
    body = json.dumps({"trainerStatus": status}).encode()
    request = urllib.request.Request(os.environ[f"{prefix}URL"], body, headers, method="POST")
    urllib.request.urlopen(request, timeout=_TIMEOUT, context=context).close()
