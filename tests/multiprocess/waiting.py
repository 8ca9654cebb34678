"""Waiting, within a limit."""

import time


def wait_until(happens, seconds):
    ends = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < ends
        time.sleep(0.2)
