"""Program of the warm spare: imports the modules that tasks need, and forks a task for each request. Only the standard library here.

Python imports a module of this name before it runs a script. The spare has the command line of the tasks, and this module returns only
in forked processes. There Python runs the script: arguments, `__main__`, tracebacks and the exit are those of any process.
`launch/warm.py` starts the spare.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

VARIABLE = "TFDIST_SPARE"  # the spare's own part of the environment, as JSON
_TITLE = b"tfdist: warm spare\0"
_shown: list[object] = []  # keeps the memory that /proc shows
_SET_MM, _SET_MM_MAP = 35, 14  # of prctl


def _serve(plan: str) -> None:
    """Imports modules and forks a process for each request; returns in these processes, and never in the spare."""
    import gc
    import json
    import socket
    import time

    descriptor, pythonpath, folder, modules = json.loads(plan)
    launcher = socket.socket(fileno=descriptor)
    _be_replaced(pythonpath)
    with open("/proc/self/cmdline", "rb") as file:
        command_line = file.read()
    _show(_TITLE, os.environb)
    gc.disable()  # a collection would take a second and free nothing
    if not _import(modules, folder):
        os._exit(1)
    gc.freeze()  # otherwise each collection in a task copies the pages that it shares with the spare
    launcher.send(b"ready")
    while True:
        request, files, _, _ = socket.recv_fds(launcher, 1 << 18, 3)
        if not request:  # the launcher has ended, or needs no more tasks
            os._exit(0)
        # The parent of a task is the launcher: it adopts the task, because the process between them ends at once.
        if between := os.fork():
            os.waitpid(between, 0)
            launcher.send(b"forked")
            for descriptor in files:
                os.close(descriptor)
            continue
        between = os.getpid()
        if os.fork() == 0:
            break
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    os.setsid()
    launcher.send(str(os.getpid()).encode())
    launcher.close()
    for number, descriptor in zip((1, 2, 0), files, strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for name, value in json.loads(request).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _show(command_line, os.environb)
    sys.modules[
        "numpy"
    ].random.seed()  # otherwise all tasks would draw the same numbers; Python's `random` seeds itself after a fork
    gc.enable()


def _be_replaced(pythonpath: str | None) -> None:
    """Restores the path and the environment, and imports the module of this name that this file hides, if there is one."""
    del os.environ[VARIABLE]
    if pythonpath is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = pythonpath
    sys.path.remove(os.path.dirname(__file__))
    import importlib

    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError:
        sys.modules[__name__] = this  # Python looks it up once more


def _show(command_line: bytes, environ: Mapping[bytes, bytes]) -> None:
    """Sets the command line and the environment that /proc shows; has no effect if the kernel does not allow it."""
    import ctypes
    import struct

    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    variables = b"".join(b"%b=%b\0" % pair for pair in environ.items())
    shown = [ctypes.create_string_buffer(content, len(content)) for content in (command_line, variables)]
    bounds = [bound for each in shown for bound in (ctypes.addressof(each), ctypes.addressof(each) + len(each))]
    with open("/proc/self/stat", "rb") as file:
        numbers = [b"0"] * 3 + [*file.read().rpartition(b")")[2].split()]  # of fields 1, 2, ...
    code, stack, data, heap = numbers[26:28], numbers[28], numbers[45:47], numbers[47]
    unchanged = [*map(int, (*code, *data, heap)), library.sbrk(0), int(stack)]
    layout = struct.pack("<12Q2I", *unchanged, *bounds, 0, 0, 0xFFFFFFFF)
    library.prctl(_SET_MM, _SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0)
    _shown.append(shown)


def _import(modules: list[str], folder: str) -> bool:
    """Imports modules. Returns False if they have started threads, which a fork would lose, or if a task would import other modules."""
    import importlib
    import importlib.util

    importlib.import_module("numpy")  # its BLAS, and SciPy's, start threads that they end before a fork
    if importlib.util.find_spec("scipy"):
        importlib.import_module("scipy.linalg")
    threads = len(os.listdir("/proc/self/task"))
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > threads:
        return False
    for name in {entry.partition(".")[0] for entry in os.listdir(folder)} & set(sys.modules):
        spec = importlib.machinery.PathFinder.find_spec(name, [folder])
        ours = getattr(sys.modules[name], "__file__", None)
        if spec and spec.has_location and not (ours and os.path.samefile(str(spec.origin), ours)):
            return False
    return True


if VARIABLE in os.environ:
    try:
        _serve(os.environ[VARIABLE])
    except BaseException:  # Python would run the script
        os._exit(1)
