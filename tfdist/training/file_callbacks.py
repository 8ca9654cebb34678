"""Files of callbacks that run on all workers: the chief's alone are where they were asked for."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

import keras

from tfdist.runtime.temporary import temporary_folder
from tfdist.training.callback_kinds import place_attribute

_NO_SERVER = "no address (of the workers, the chief alone sends)"


@contextlib.contextmanager
def redirect_to_temporary_files(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Lets writers write to a temporary folder, which is removed in the end; then they have their own places again.

    For the workers: a subclass that predicts in a hook must do so on all of them, but their files would be the chief's.

    Args:
        callbacks: Of which those that are no writers are left as they are.
    """
    places = [
        (each, name, place)
        for each in callbacks
        if (name := place_attribute(each)) and isinstance(place := getattr(each, name, None), (str, pathlib.PurePath))
    ]  # None means that it does not write
    if not places:
        yield
        return
    with temporary_folder() as folder:
        for number, (callback, name, place) in enumerate(places):
            setattr(callback, name, _elsewhere(place, os.path.join(folder, str(number))))
        try:
            yield
        finally:
            for callback, name, place in places:
                setattr(callback, name, place)


def _elsewhere(place: str | pathlib.PurePath, folder: str) -> str | pathlib.Path:
    """Returns a place in `folder`, which it creates, instead of `place`; instead of a server's address, none."""
    if str(place).startswith(("http://", "https://")):
        return _NO_SERVER
    os.mkdir(folder)
    file = os.path.join(folder, os.path.basename(place))
    return file if isinstance(place, str) else pathlib.Path(file)
