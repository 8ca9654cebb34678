"""The report of `tfdist verify`: a table, `verify.json`, and a page of Markdown, `verify.md`. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.runtime import files
from tfdist.verify.arms import NAMES, Plan
from tfdist.verify.verdicts import DIFFERS, Arm, CheckResult, conclusion, judge

EQUAL_CODE = 0
DIFFERS_CODE = 1
DID_NOT_RUN_CODE = 2


@dataclasses.dataclass
class Report:
    """The result of a verification.

    Attributes:
        plan: The command and its cluster.
        arms: The arms that have trained, by letter.
        seconds: The seconds of each arm.
        failure: Why an arm did not run; empty if all have.
    """

    plan: Plan
    arms: dict[str, Arm] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def verdicts(self) -> list[CheckResult]:
        """The verdicts on the arms; none without the arm A."""
        if "A" not in self.arms:
            return []
        return judge(self.arms["A"], self.arms.get("B"), self.arms.get("C"), self.arms.get("D"), self.plan.name)

    @property
    def exit_code(self) -> int:
        """0 if the arms are equal; 1 if they differ, also before one has failed; 2 if one has failed."""
        if any(verdict.status == DIFFERS for verdict in self.verdicts):
            return DIFFERS_CODE
        return DID_NOT_RUN_CODE if self.failure else EQUAL_CODE

    @property
    def conclusion(self) -> str:
        """The result in one line."""
        if self.exit_code == DID_NOT_RUN_CODE:
            return f"did not run: {self.failure.splitlines()[0]}"
        return conclusion(self.verdicts, self.plan.name, max(self._first.first, default=0))

    @property
    def _first(self) -> Arm:
        return self.arms.get("C", self.arms["A"])

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `verify.json`."""
        head: Mapping[str, Any] = self._first.heads[0] if self.arms else {}
        return {
            "conclusion": self.conclusion,
            "exit_code": self.exit_code,
            "command": list(self.plan.command),
            "script_digest": script_digest(self.plan.command),
            "seed": self.plan.seed,
            "steps": self.plan.steps,
            "strategy": head.get("strategy"),
            "replicas": head.get("replicas"),
            "versions": head.get("versions"),
            "seconds": {arm: round(seconds, 1) for arm, seconds in self.seconds.items()},
            "killed_at": self.arms["D"].killed_at if "D" in self.arms else None,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "failure": self.failure,
        }

    def as_text(self) -> str:
        """Returns the table for a terminal."""
        verdicts = self.verdicts
        width = max((len(verdict.check) for verdict in verdicts), default=0)
        status = max((len(verdict.status) for verdict in verdicts), default=0)
        lines = [f"{verdict.check:{width}}  {verdict.status:{status}}  {verdict.text}" for verdict in verdicts]
        if self.failure:
            lines.append(self.failure)
        return "\n".join([*lines, f"tfdist verify: {self.conclusion}"])

    def as_markdown(self) -> str:
        """Returns the page."""
        content = self.as_json()
        versions = ", ".join(f"{name} {version}" for name, version in (content["versions"] or {}).items())
        arms = ", ".join(f"{arm} {NAMES[arm]} ({content['seconds'][arm]} s)" for arm in self.arms)
        lines = [
            "# tfdist verify",
            "",
            f"- command: `{shlex.join(self.plan.command)}`",
            f"- script: sha256 `{content['script_digest'] or 'unknown'}`",
            f"- compared with one device: {self.plan.name} (`{content['strategy']}`, {content['replicas']} replicas)",
            f"- versions: {versions}",
            f"- seed: {self.plan.seed}, for scripts that set none; updates: {self.plan.steps}",
            f"- arms: {arms}",
            "",
            "| check | verdict | numbers |",
            "|---|---|---|",
        ]
        for verdict in self.verdicts:
            text = verdict.text.replace("|", "\\|")
            lines.append(f"| {verdict.check} | {verdict.status} | {text} |")
        return "\n".join([*lines, "", f"`tfdist verify`: {self.conclusion}", ""])

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes `verify.json` and `verify.md`. Raises OSError if the folder cannot be written to."""
        out = pathlib.Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        files.write_file(out / "verify.json", f"{json.dumps(self.as_json(), indent=1)}\n".encode())
        files.write_file(out / "verify.md", self.as_markdown().encode())


def script_digest(command: Sequence[str]) -> str:
    """Returns the SHA-256 of the first Python file among the words of a command, or an empty text."""
    for word in command:
        if word.endswith(".py") and os.path.isfile(word):
            return hashlib.sha256(files.read_file(word)).hexdigest()
    return ""
