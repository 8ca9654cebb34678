"""Runs tests with the ends of the ranges of Python, TensorFlow and Keras that `pyproject.toml` declares.

    python tools/versions.py [--only=NAME] [--root=DIR] [PYTEST ARGUMENTS]

Each row of `ROWS` gets a virtual environment, which is kept for the next time, with this tree and the row's packages in it. A row whose
Python is not on this machine is named and left out; with `--all` it is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

TREE = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """An environment.

    Attributes:
        python: The Python, as `3.11`.
        packages: Requirements of pip.
    """

    python: str
    packages: tuple[str, ...]


ROWS = {
    "oldest": Row("3.11", ("tensorflow==2.18.*", "keras==3.13.*", "tf_keras==2.18.*")),
    "newest": Row("3.13", ("tensorflow==2.21.*", "keras==3.15.*", "tf_keras==2.21.*")),
}


def find_python(version: str) -> str | None:
    """Returns the command of a Python of this version, or None."""
    candidates = [sys.executable, shutil.which(f"python{version}"), *map(str, _of_pyenv(version))]
    for command in filter(None, candidates):
        asked = [command, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return command
    return None


def _of_pyenv(version: str) -> list[pathlib.Path]:
    """Returns pythons that pyenv has installed; its commands on the path refuse what it was not told to use."""
    return sorted(
        pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python")
    )


def make_environment(row: Row, python: str, folder: pathlib.Path) -> None:
    """Makes a virtual environment with this tree and a row's packages, unless it is there."""
    wanted = hashlib.sha256(f"{python} {row} {(TREE / 'pyproject.toml').read_text()}".encode()).hexdigest()
    made = folder / "made"
    if made.exists() and made.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--editable", f"{TREE}[dev]", *row.packages], check=True)
    made.write_text(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, help="run one row")
    parser.add_argument(
        "--root", type=pathlib.Path, default=TREE / "build" / "versions", help="where environments are kept"
    )
    parser.add_argument("--all", action="store_true", help="a Python that is not there is an error")
    options, arguments = parser.parse_known_args()
    results = {}
    environ = dict(os.environ)
    for name, row in ROWS.items():
        if options.only not in (None, name):
            continue
        title = f"{name}: Python {row.python}, {', '.join(row.packages)}"
        python = find_python(row.python)
        if python is None:
            print(f"{title}: not run, as there is no Python {row.python} on this machine", flush=True)
            results[name] = options.all
            continue
        print(title, flush=True)
        folder = options.root / name
        make_environment(row, python, folder)
        command = [str(folder / "bin" / "python"), "-m", "pytest", *arguments]
        results[name] = subprocess.run(command, cwd=TREE, env=environ, check=False).returncode != 0
        environ["TFDIST_OTHER_PYTHON"] = str(folder / "bin" / "python")  # for tests of tasks that differ
        print(f"{title}: {'failed' if results[name] else 'passed'}", flush=True)
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
