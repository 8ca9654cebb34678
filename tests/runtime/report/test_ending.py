"""A process writes to its record why it ends; the sentence is the line of the error that names its cause."""

from __future__ import annotations

import bdb
import os
import subprocess
import sys

import pytest

from tfdist.runtime.report import ending, progress

PROGRAM = """
import importlib, os, sys, threading, traceback
import tfdist
progress = importlib.import_module("tfdist.runtime.report.progress")
process_end = importlib.import_module("tfdist.runtime.end.process_end")
log = importlib.import_module("tfdist.runtime.log")
progress.write(done=7)
def divide():
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("end", "kind", "error", "exit_code"),
    [
        ("divide()", "error", "ZeroDivisionError: division by zero", 1),
        ("sys.excepthook = lambda *_: None\ndivide()", "error", "ZeroDivisionError: division by zero", 1),
        ("raise tfdist.ConfigError(['first', 'second'])", "config", "ConfigError: first", 1),
        ("raise tfdist.ClusterError('worker:1 has ended')", "error", "ClusterError: worker:1 has ended", 1),
        ("bytearray(1 << 60)", "memory", "MemoryError", 1),
        ("breakpoint()", "input", "BdbQuit", 1),
        ("input()", "input", "EOFError: EOF when reading a line", 1),
        (
            "progress.write(lost=progress.Loss('worker:1', 'x'))\ndivide()",
            "lost",
            "ZeroDivisionError: division by zero",
            1,
        ),
        ("log.logger.error('no answer.')\nprocess_end.end(1)", "error", "no answer", 1),
        ("process_end.exit_code = 2\nlog.logger.error('unknown field')\nsys.exit(2)", "config", "unknown field", 2),
        ("process_end.end_at_once()", "preempted", "", 75),
        # These go on, or tell nothing.
        ("try:\n    divide()\nexcept ZeroDivisionError:\n    traceback.print_exc()", "", "", None),
        ("thread = threading.Thread(target=divide)\nthread.start()\nthread.join()", "", "", None),
        ("sys.exit('a text')", "", "", None),
        ("os._exit(3)", "", "", None),
        ("if not os.fork():\n    divide()\nos.wait()", "", "", None),
    ],
)
def test_the_record_has_the_end(tmp_path, end, kind, error, exit_code):
    environ = {**os.environ, progress.FOLDER: str(tmp_path), progress.TASK: "worker-1"}
    subprocess.run([sys.executable, "-c", PROGRAM + end], env=environ, timeout=60, stdin=subprocess.DEVNULL)
    record = progress.read(str(tmp_path), "worker-1")
    assert (record.kind, record.error, record.exit_code, record.done) == (kind, error, exit_code, 7)
    progress.forget_end(str(tmp_path), "worker-1")
    record = progress.read(str(tmp_path), "worker-1")
    assert (record.kind, record.lost, record.exit_code, record.done) == ("", None, None, 7)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "Exception encountered when calling Sequential.call().\n\n\x1b[1mInput 0 of layer 'dense' has axis -1 of 5.\x1b[0m\n\n"
            "Arguments received by Sequential.call():\n  • mask=None",
            "Input 0 of layer 'dense' has axis -1 of 5",
        ),
        (
            "Graph execution error:\n\nDetected at node x\n<stack traces unavailable>\ntoo large\n\t [[{{node x}}]]",
            "too large",
        ),
        ("use strategy tpu.", "use strategy tpu"),
        ("first fault.\nsecond fault.", "first fault"),
        ("x" * 300, "x" * 185 + "..."),
    ],
)
def test_the_sentence_is_the_line_that_says_something(message, line):
    assert ending.one_line(ValueError(message)) == f"ValueError: {line}"


def test_a_debugger_without_an_answer_is_named_although_keras_raises_another_error():
    try:
        try:
            raise bdb.BdbQuit
        except bdb.BdbQuit:
            raise RuntimeError("Exception encountered when calling Layer.call().") from None
    except RuntimeError as error:
        assert ending.one_line(error) == "BdbQuit"
