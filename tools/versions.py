"""Runs tests with the oldest and the newest releases of Python, TensorFlow and Keras that `pyproject.toml` declares, and with the next.

    python tools/versions.py [--only=NAME] [--root=DIR] [PYTEST ARGUMENTS]

Each row of `ROWS` gets a virtual environment, which is kept for the next time, with this tree and the row's packages in it. A row whose
Python is not on this machine is named and left out; with `--all` it is an error. Failures of the row `next` are reported, and are no
error unless it runs alone: what is not released yet does not keep a change back.
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
import tomllib

TREE = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """An environment.

    Attributes:
        pythons: Versions of Python, as `3.11`; the first one on this machine is taken.
        packages: Requirements of pip.
        alone: Packages that are installed last, without their dependencies, in place of Keras. They and `packages` replace the
            requirements of `pyproject.toml`, which would exclude them.
    """

    pythons: tuple[str, ...]
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()


ROWS = {
    "oldest": Row(("3.11",), ("tensorflow==2.18.*", "keras==3.13.*", "tf_keras==2.18.*")),
    "newest": Row(("3.13",), ("tensorflow==2.21.*", "keras==3.15.*", "tf_keras==2.21.*")),
    # A requirement that names a candidate takes candidates. No tf_keras allows this TensorFlow; the last one works with it.
    "next": Row(("3.14", "3.13"), ("tensorflow>=2.22.0rc0",), ("keras-nightly>=3.16.0.dev0", "tf_keras")),
}
_REPLACED = ("tensorflow", "keras", "tf_keras")


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
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    wanted = hashlib.sha256(f"{python} {row} {(TREE / 'pyproject.toml').read_text()}".encode()).hexdigest()
    made = folder / "made"
    if made.exists() and made.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if row.alone:
        needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
        kept = [each for each in needed if not each.startswith(tuple(f"{name}>" for name in _REPLACED))]
        subprocess.run([*pip, *kept, *row.packages], check=True)
        subprocess.run([*pip[:4], "uninstall", "--quiet", "--yes", "keras", "keras-nightly"], check=True)
        subprocess.run([*pip, "--no-deps", *row.alone, "--editable", str(TREE)], check=True)
    else:
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
        found = {version: path for version in row.pythons if (path := find_python(version))}
        if not found:
            print(f"{name}: not run, as there is no Python {' or '.join(row.pythons)} on this machine", flush=True)
            results[name] = options.all
            continue
        version, python = next(iter(found.items()))
        title = f"{name}: Python {version}, {', '.join(row.packages + row.alone)}"
        print(title, flush=True)
        folder = options.root / name
        make_environment(row, python, folder)
        command = [str(folder / "bin" / "python"), "-m", "pytest", *arguments]
        results[name] = subprocess.run(command, cwd=TREE, env=environ, check=False).returncode != 0
        environ["TFDIST_OTHER_PYTHON"] = str(folder / "bin" / "python")  # for tests of tasks that differ
        print(f"{title}: {'failed' if results[name] else 'passed'}", flush=True)
    blocking = results if options.only else {name: failed for name, failed in results.items() if name != "next"}
    return int(any(blocking.values()))


if __name__ == "__main__":
    sys.exit(main())
