"""Files that cannot be read: root reads them all, so tests take another user's place for a while."""

import contextlib
import os
import pathlib
import shutil
import tempfile

NOBODY = 65534


@contextlib.contextmanager
def open_folder():
    """Makes a folder that every user can reach and write to, which pytest's are not."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-open-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)


@contextlib.contextmanager
def unprivileged():
    """Lets this process obey permissions inside, if it is root."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
