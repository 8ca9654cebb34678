"""What ranks of a test tell each other, as files of a folder."""

import pathlib
import time

from tfdist.collectives.buffer_transport import Store


def open_store(folder, rank, size, **options):
    """Returns the store of a rank."""
    folder = pathlib.Path(folder)

    def put(key, text):
        new = folder / f"new-{rank}"
        new.write_text(text)
        new.rename(folder / key.replace("/", "-"))

    def get(key, timeout_seconds):
        path, limit = folder / key.replace("/", "-"), time.monotonic() + timeout_seconds
        while not path.exists():
            if time.monotonic() > limit:
                raise RuntimeError(f"no {key}")
            time.sleep(0.01)
        return path.read_text()

    return Store(rank, size, put, get, "job", **options)
