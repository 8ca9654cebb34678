"""Program of each task of `tfdist.ray.run`: calls the function, and writes its outcome for the actor. No TensorFlow here."""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
import sys
import traceback

from tfdist.runtime.report import progress

# Files in the folder of the task's records.
FUNCTION = "function"
OUTCOME = "outcome"


def main() -> None:
    """Calls the function, and writes its traceback or, on worker 0, its return value."""
    import ray
    from ray import cloudpickle

    folder = pathlib.Path(os.environ[progress.FOLDER])
    outcome = folder / OUTCOME
    try:
        with (folder / FUNCTION).open("rb") as file:
            # The function's modules are where the caller has found them, if this node has the folder.
            sys.path += [entry for entry in pickle.load(file) if entry not in sys.path]
            begin = file.tell()
            try:
                train = pickle.load(file)
            except (
                ray.exceptions.RaySystemError
            ):  # it holds references or actors, which only a connected process can load
                ray.init(log_to_driver=False, logging_level=logging.WARNING)  # to the cluster of RAY_ADDRESS
                file.seek(begin)
                train = pickle.load(file)
        value = train()
        if os.environ[progress.TASK] == "worker-0":
            outcome.write_bytes(cloudpickle.dumps(value))
    except Exception as error:
        frames = error.__traceback__ and error.__traceback__.tb_next  # without this function's
        outcome.write_text("".join(traceback.format_exception(type(error), error, frames)))
        raise


if __name__ == "__main__":
    main()
