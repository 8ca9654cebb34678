"""Program of the warm spare: imports the modules that tasks need, and forks a task for each request. Only the standard library here.

`launch/warm.py` runs this file by its path, with these words: the descriptor of a socket, the folder that a task searches first for
modules, the modules to import, and the command of the tasks.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import types


def _import(modules: list[str], folder: str) -> bool:
    """Imports modules. Returns False if they have started threads, which a fork would lose, or if a task would import other modules."""
    importlib.import_module("numpy")  # its BLAS, and SciPy's, start threads that they end before a fork
    if importlib.util.find_spec("scipy"):
        importlib.import_module("scipy.linalg")
    # Keras imports pandas, and that pyarrow, whose allocator would start a thread.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
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


def _fork_tasks(launcher: socket.socket) -> None:
    """Forks a task for each request; returns in the tasks, which have the files and the environment of their request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, files, _, _ = socket.recv_fds(launcher, 1 << 18, 3)
        if not request:  # the launcher has ended, or needs no more tasks
            os._exit(0)
        # This child reports the end of the task, so that a task does not depend on the spare.
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    launcher.close()
    # The spare ignores it, so that the kernel reaps its children; this child needs the exit code of the task.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, report, *stdin = files
    task = os.fork()
    if task:
        # Otherwise the launcher would not see the end of the task's output.
        for file in (output, *stdin):
            os.close(file)
        _, status = os.waitpid(task, 0)
        os.write(report, b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.setsid()  # before the launcher knows the process: it signals the group
    os.write(report, b"%d" % os.getpid())
    for number, file in zip((1, 2, 0), (output, output, *stdin), strict=False):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    for name, value in json.loads(request).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    task_spec = json.loads(os.environ["TF_CONFIG"])["task"]
    with open("/proc/self/comm", "w") as comm:  # `ps` and `top` show the command line of the spare
        comm.write(f"{task_spec['type']}-{task_spec['index']}")


def _run(command: list[str]) -> None:
    """Runs a Python command as a new process would, in a new `__main__`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.orig_argv[:] = command
    sys.argv[:] = command[1:]
    if sys.argv[0] == "-u":
        del sys.argv[0]
    ending = sys.modules.get("tfdist.runtime.report.ending")
    if ending:  # a fork begins without calls at its end
        ending.listen()
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # the function behind `python -m`
        else:
            path = os.path.join(os.getcwd(), sys.argv[0])
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
            exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), vars(main))  # noqa: S102  # the user's script
    except SystemExit:
        raise
    except BaseException as error:
        # Python would print the frames of this file, too. It still sets the exit code, and ends by SIGINT after a KeyboardInterrupt.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None
        raise


def main() -> None:
    """Imports the modules, tells the launcher, and runs the command in each task."""
    descriptor, folder, modules, *command = sys.argv[1:]
    del sys.path[0]  # the folder of this file
    launcher = socket.socket(fileno=int(descriptor))
    gc.disable()  # a collection would take a second and free nothing
    if not _import(modules.split(","), folder):
        return
    gc.freeze()  # otherwise each collection in a task copies the pages that it shares with the spare
    sys.path.insert(0, folder)
    launcher.send(b"ready")
    _fork_tasks(launcher)
    # Otherwise all tasks would draw the same numbers; Python's `random` seeds itself after a fork.
    sys.modules["numpy"].random.seed()
    gc.enable()
    _run(command)


if __name__ == "__main__":
    main()
