"""Code of the user's that ends a process before the training has finished is named, and gives no exit code 0."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from tfdist.runtime.end import process_end
from tfdist.runtime.log import print_always

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

print_always()
code = process_end.run_to_the_end(lambda: {})
os._exit(code)
"""
CASES = {
    "sys.exit(0)": (
        1,
        r"<string>:\d+ called sys.exit\(0\) before the training has finished. To end a training early, set",
    ),
    "sys.exit()": (1, r"sys.exit\(\)"),
    "exit(0)": (1, r"<string>:\d+ called sys.exit\(0\)"),
    "sys.exit(3)": (3, r"sys.exit\(3\)"),
    "sys.exit('no data')": (1, r"sys.exit\('no data'\)"),
    "os._exit(0)": (1, r"<string>:\d+ called os._exit\(0\)"),
    "os._exit(5)": (5, r"os._exit\(5\)"),
    "fork()": (0, "child 0\n"),
    "None": (0, ""),
}


@pytest.mark.parametrize("call", CASES)
def test_a_process_that_is_ended_early_says_by_whom(call):
    code, said = CASES[call]
    program = PROGRAM.format(call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done
    assert re.search(said, done.stdout + done.stderr), done
    assert (" called " in done.stderr) == (" called " in said or "exit" in said)
