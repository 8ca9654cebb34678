"""Writes README's block of what `make demo` prints, from a run of it.

    python -m tools.site.demo

tests/end_to_end/test_train.py compares the block with its own run of the same job, numbers aside.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
BEGIN = "<!-- written by: python -m tools.site.demo -->\n```\n"
END = "```\n<!-- end of demo output -->\n"
WORKDIR = "runs/demo"
_MIDDLE = re.compile(r"(?<=\n)\[worker:0\] Epoch 2/.*?(?=\[worker:0\] Epoch (\d+)/\1\n)", re.DOTALL)
_TRANSPORT = re.compile(r"^\[worker:0\] tfdist: gradients travel by .*\n", re.MULTILINE)


def shorten(output: str) -> str:
    """Returns the demo's output without the choice of the transport and all epochs but the first and the last one."""
    return _MIDDLE.sub("...\n", _TRANSPORT.sub("", output))


def without_numbers(text: str) -> str:
    """Returns what is the same in each run: no numbers, no parts of the wall time, and not how gradients travel."""
    text = re.sub(r"^(wall time: .*? s: ).*$", r"\1...", text, flags=re.MULTILINE)
    text = re.sub(r"^(network bytes per step: .*?)\(.*gradients.*\)$", r"\1(gradients)", text, flags=re.MULTILINE)
    return re.sub(r"(?<= )[\d.,]+(?=ms|s| |$)", "N", text, flags=re.MULTILINE)


def shown() -> str:
    """Returns the block in README.md."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def run() -> str:
    """Returns what the demo prints now."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tfdist", "train", "--config=digits_multi_worker", f"--workdir={WORKDIR}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environ, text=True, check=True, stdout=subprocess.PIPE)
    return done.stdout


def main() -> None:
    """Writes the block into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + shorten(run()) + END + after)


if __name__ == "__main__":
    main()
