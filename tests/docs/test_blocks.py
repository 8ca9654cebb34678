"""Each Python block of a page runs as it stands there: the blocks of a page in order, in one process of their own."""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml

from tests.docs.pages import blocks, readers_files
from tests.docs.test_extending import EXAMPLES
from tests.helpers import fork_server, tiers

# test_extending.py runs the first page's blocks, test_commands.py the second's as a file, `python script.py`.
RUN_ELSEWHERE = {"docs/extending.md": list(EXAMPLES.values()), "README.md": [readers_files()["script.py"]]}
RUN = [block for block in blocks("python") if not block.shown_only and block.page not in RUN_ELSEWHERE]
PAGES_RUN = dict.fromkeys(block.page for block in RUN)
# They train as the README's script does, which test_commands.py runs.
AS_THE_README = {"docs/from-accelerate.md", "docs/migrate-from-horovod.md"}


@pytest.mark.parametrize("page", tiers.cases(PAGES_RUN, quick=set(PAGES_RUN) - AS_THE_README))
def test_python_blocks_run(page, tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    command = fork_server.command("tests.docs.page_program", page)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran the block") == len([block for block in RUN if block.page == page])


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_other_blocks_are_run_by_their_own_test(page):
    assert [block.text for block in blocks("python") if block.page == page] == RUN_ELSEWHERE[page]


def test_blocks_are_of_languages_that_a_test_runs_or_show_output():
    known = {
        "python": "here",
        "bash": "test_commands.py",
        "toml": "test_extending.py",
        "yaml": "below",
        "mermaid": "a picture",
        "": "output",
    }
    assert not [(block.page, block.language) for block in blocks() if block.language not in known]
    assert all(yaml.safe_load(block.text) for block in blocks("yaml"))
    # What a command prints begins with the name of a task, or of a part of the package; a command does not.
    words = (
        "python",
        "pip",
        "make",
        "srun",
        "sbatch",
        "mpirun",
        "kubectl",
        "cd",
        "export",
        "import",
        "from",
        "$",
        ">>>",
    )
    lines = [
        (block.page, line)
        for block in blocks("")
        if not block.shown_only
        for line in block.text.splitlines()
        if line.startswith(words)
    ]
    assert not lines, "give the block a language, or mark it as shown only"
