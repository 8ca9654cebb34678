"""The folder in which a reader of the pages runs their commands."""

import sys

import pytest

from tests.docs.pages import ROOT, readers_files


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that the commands name, as the pages show them; modules imported from it are forgotten afterwards."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my_task").symlink_to(ROOT / "examples/my_task")
    for name, text in readers_files().items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{tmp_path}/"):
            del sys.modules[name]
