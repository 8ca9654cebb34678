"""TensorFlow's log of absent drivers does not stand before a command's first line, unless the user asks for it."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ["-m", "tfdist", "train", "--config=default", "--config.epochs=1", "--config.steps_per_epoch=1"]
IMPORT = """
import os, sys
from tfdist.runtime import tensorflow_log
tensorflow_log.set_level()
with tensorflow_log.filtered():
    print("a line of mine", file=sys.stderr)
    os.write(2, b"I0000 00:00:1795536441.651659    1998 port.cc:153] oneDNN\\nF0000 00:00:1.2 3 port.cc:153] no AVX\\n")
    os.write(2, b"the last words")
    {end}
os.write(2, b", and then more")
"""
LOG = b"oneDNN"


def run(*arguments, **environ):
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CPP_MIN_LOG_LEVEL", "TF_CONFIG")}
    environ = {**kept, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("level", "is_shown"), [(None, False), pytest.param("0", True, marks=pytest.mark.full)])
def test_a_command_shows_the_log_if_the_user_has_set_its_level(tmp_path, level, is_shown):
    code, output, errors = run(*TRAIN, f"--workdir={tmp_path}", **({"TF_CPP_MIN_LOG_LEVEL": level} if level else {}))
    assert code == 0 and output.startswith(b"one_device: 1 replica"), errors
    assert (b"cudart_stub.cc" in errors or LOG in errors) == is_shown
    if not is_shown:
        assert errors == b""


@pytest.mark.parametrize(
    ("end", "fails", "expected"),
    [
        ("pass", False, b"the last words, and then more"),
        ("os.abort()", True, b"the last words"),
        ("raise ImportError('broken')", True, b"ImportError: broken\n"),
    ],
)
def test_what_is_not_of_the_log_is_kept_also_if_the_process_is_aborted(end, fails, expected):
    code, _, errors = run("-c", IMPORT.format(end=end))
    assert (code != 0) == fails
    assert errors.startswith(b"a line of mine\nF0000 00:00:1.2 3 port.cc:153] no AVX\nthe last words")
    assert errors.endswith(expected) and LOG not in errors


def test_a_level_that_the_user_has_set_is_heeded():
    code, _, errors = run("-c", IMPORT.format(end="pass"), TF_CPP_MIN_LOG_LEVEL="0")
    assert code == 0 and LOG in errors
