"""Runs the checks beside each other, each for a limited time: a file system or a name server that hangs holds up none but its own.

No TensorFlow here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from tfdist.doctor.finding import WARNING, Finding, printable
from tfdist.errors import told

Check = Callable[[Mapping[str, str]], Iterable[Finding]]


def examine(checks: Mapping[str, tuple[Check, float]], environ: Mapping[str, str]) -> list[Finding]:
    """Returns the findings of all checks, in their order.

    Args:
        checks: By what each looks at: the check, and for how many seconds it may.
        environ: The environment.
    """
    found: dict[str, list[Finding]] = {name: [] for name in checks}
    broken: dict[str, str] = {}

    def look(name: str, check: Check) -> None:
        try:
            for finding in check(environ):
                found[name].append(finding)
        except Exception as e:  # the others are worth more than this one
            broken[name] = printable(told(e))

    began = time.monotonic()
    threads = {
        name: threading.Thread(target=look, args=(name, check), daemon=True, name=f"tfdist-doctor-{name}")
        for name, (check, _) in checks.items()
    }
    for thread in threads.values():
        thread.start()
    findings: list[Finding] = []
    for name, (_, limit) in checks.items():
        threads[name].join(max(0.0, began + limit - time.monotonic()))
        findings += list(found[name])
        if threads[name].is_alive():
            findings.append(
                Finding(WARNING, name, f"no answer within {limit:.0f} s", "look whether a disk or name server hangs")
            )
        elif name in broken:
            findings.append(Finding(WARNING, name, f"cannot be looked at: {broken[name]}", "see the other findings"))
    return findings
