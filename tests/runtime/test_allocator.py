"""Large blocks of memory stay with the process."""

import platform
import subprocess
import sys

import pytest

# Each page that the system gives anew is a fault.
SCRIPT = """
import ctypes, resource, threading
from tfdist.runtime import allocator as memory
print(memory.configure_malloc())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.prctl(41, 1, 0, 0, 0)  # no huge pages, of which a block has few
size = 40_000_000  # more than 32 MB, which glibc learns to keep
def use():
    for round in range(11):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
        if not round:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / size)
use()
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def run(**environ):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    keeps, faults = done.stdout.split()
    return keeps, float(faults)


def test_pages_are_not_given_back_and_taken_again():
    keeps, blocks = run()
    assert keeps == "True" and blocks < 0.1


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_who_has_chosen_is_heeded(name):
    keeps, blocks = run(**{name: "1" if name.startswith("M") else "glibc.malloc.arena_max=1"})
    assert keeps == "False" and blocks > 5
