"""Tasks that a warm spare forks behave as spawned tasks do. Keras is a small file in its place, except in the full tier."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sys

import psutil
import pytest

from tests.helpers.launched_job import until
from tfdist.cluster import TaskSpec
from tfdist.launch import process, warm
from tfdist.launch.guardian import Guardian
from tfdist.runtime.report import progress
from tfdist.runtime.tensorflow_log import is_tensorflow_log

# Each part prints what a script may observe, and ends as the name says.
SCRIPT = """
import atexit, faulthandler, json, multiprocessing, os, psutil, signal, subprocess, sys, threading, time, traceback
def double(x):
    return 2 * x, __name__, os.environ["OF_ALL"]
def main(*_):
    kind = os.environ["TFDIST_KIND"]
    me = psutil.Process()
    atexit.register(lambda: print("at exit", __name__, flush=True))
    print(sys.argv[1:], os.path.basename(sys.argv[0]), sys.orig_argv[1:3], __name__, os.path.basename(__file__), __spec__ and __spec__.name)
    print(os.path.basename(sys.path[0]), any("spare" in each for each in sys.path), os.getcwd(), me.cmdline()[-2:])
    print({name: value for name, value in os.environ.items() if name.startswith(("OF_", "TF_CONFIG", "PYTHON" "PATH"))})
    print(psutil.Process(int(os.environ["OF_LAUNCHER"])) in me.parents(), multiprocessing.current_process(), multiprocessing.parent_process())
    print(os.getpgrp() == os.getsid(0) == me.pid, threading.active_count(), me.num_fds(), faulthandler.is_enabled())
    print(time.time() - me.create_time() < 30, os.readlink("/proc/self/fd/0"), sys.stdout.write_through, sys.stdout.isatty())
    print({each: signal.getsignal(each) for each in (2, 13, 15)}, signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.main_thread().name)
    print(__import__("gc").isenabled(), subprocess.run(["sh", "-c", "echo $OF_ALL >&2; echo said"], capture_output=True))
    if kind == "multiprocessing":
        for method in ("spawn", "fork", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(pool.map(double, [3]))
    if kind == "train":
        import keras
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = keras.random.normal((64, 4))
        print(model.fit(x, x[:, :1], verbose=0).history)
    if kind == "exception":
        raise ValueError("cannot read shard 7")
    if kind == "text":
        sys.exit("a last text")
    if kind == "code":
        sys.exit(75)
    if kind == "os":
        print("no end of a line", end="")
        os._exit(5)
    if kind == "fault":
        faulthandler.enable()
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if kind == "uncaught hook":
        sys.excepthook = lambda kind, error, trace: print("hook", kind, error, *traceback.format_tb(trace), flush=True)
        main(missing)
    if kind in ("SIGTERM", "SIGKILL", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, kind))
if __name__ == "__main__":
    main(*sys.argv[1:])
"""
ENDS = {
    "returns": 0,
    "multiprocessing": 0,
    "train": 0,
    "uncaught hook": 1,
    "exception": 1,
    "text": 1,
    "code": 75,
    "os": 5,
    "fault": -11,
    "interrupt": -2,
    "SIGTERM": -15,
    "SIGHUP": 0 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else -1,  # ignored under nohup
    "SIGKILL": -9,
}


SMALL_KERAS = """
import absl, numpy, types
random = types.SimpleNamespace(uniform=lambda shape: numpy.random.rand(*shape))
"""


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.full)])
def keras(request, tmp_path, monkeypatch):
    """The Keras that spares and tasks import, by name."""
    if request.param == "small":
        (place := tmp_path / "small").mkdir()
        (place / "keras.py").write_text(SMALL_KERAS)
        monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
    return request.param


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the script, alone and in a package; the current folder."""
    (tmp_path / "package").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "package/neighbour.py").write_text("name = __name__\n")
    (tmp_path / "package/module.py").write_text("from . import neighbour\n" + SCRIPT + "    print(neighbour.name)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def spare(folder, keras):
    """Starts a spare for a command, with the variables of tasks; returns the spare and its environment."""
    spares = []

    def start(command, **variables):
        environ = {**os.environ, "OF_ALL": "ünicode", "OF_LAUNCHER": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        environ |= {"TF_CONFIG": "{}", progress.FOLDER: str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
        guardian = Guardian(str(folder / "guarded")).__enter__()
        each = warm.WarmSpare(command, environ, guardian).__enter__()
        spares.append((each, guardian))
        each.wait(lambda: False)
        return each, environ

    yield start
    for each, guardian in spares:
        each.close()
        guardian.__exit__(None, None, None)


def run(folder, command, environ, start):
    """Returns the exit code and the output of a task."""
    task = process.TaskProcess(TaskSpec("worker", 0), command, environ, folder / "log", start)
    try:
        output = b""
        os.set_blocking(task.pipe.fileno(), True)
        while chunk := task.pipe.read(1 << 16):
            output += chunk
        # TensorFlow's C++ log has times, and its first lines are of the import; `faulthandler` lists all that is loaded,
        # and the frames of the spare, in which the script runs.
        lines = [
            line
            for line in output.splitlines()
            if not is_tensorflow_log(line)
            and not line.startswith((b"Extension modules", b"Current thread 0x"))
            and not re.match(rb'  File ".*/launch/spare.py", line \d+ in ', line)
        ]
        return type(task.process).__name__, task.process.wait(), b"\n".join(lines).decode()
    finally:
        task.close()


@pytest.mark.parametrize("words", [["-u", "script.py"], ["-m", "package.module"]], ids=["script", "module"])
def test_a_forked_task_behaves_as_a_spawned_one(folder, spare, keras, words):
    command = [sys.executable, *words, "first", "--flag=a b"]
    here, environ = spare(command)
    kinds = ENDS
    if keras == "small":
        kinds = {kind: code for kind, code in ENDS.items() if kind != "train"}
        if "-m" in words:
            kinds = {kind: ENDS[kind] for kind in ("returns", "multiprocessing", "exception")}
    for kind, code in kinds.items():
        environ |= {"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}', "TFDIST_KIND": kind}
        forked, spawned = (run(folder, command, environ, start) for start in (here.start, process.spawn))
        assert (forked[0], spawned[0]) == ("ForkedProcess", "Popen"), kind
        assert forked[1:] == spawned[1:], kind
        assert forked[1] == code or (kind == "interrupt" and "-m" in words), (kind, forked)


TRAINER = "tfdist.training.trainer"


@pytest.mark.parametrize(
    ("text", "words", "modules"),
    [
        ("import keras", ["{python}", "script.py", "--flag"], ["keras"]),
        ("import os, keras", ["{python}", "-u", "script.py"], ["keras"]),
        (
            "def f():\n    from tfdist.data import epochs\nimport tensorflow as tf",
            ["python", "./script.py"],
            ["tensorflow", TRAINER],
        ),
        ("import keras", ["{python}", "-m", "script"], ["keras"]),
        ("", ["{python}", "-m", "tfdist.train", "--config=digits"], [TRAINER]),
        (
            "import keras\nos.environ['TF_NUM_INTRAOP_THREADS'] = os.environ['TF_CONFIG']",
            ["{python}", "script.py"],
            ["keras"],
        ),
        # Spawned.
        ("import os", ["{python}", "script.py"], None),
        ("# keras\nimport keras_utils", ["{python}", "script.py"], None),
        ("import keras\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'", ["{python}", "script.py"], None),
        ("import keras\nos.environ.setdefault('OMP_NUM_THREADS', '1')", ["{python}", "script.py"], None),
        ("import keras\nos.environ['PYTHONHASHSEED'] = '1'", ["{python}", "script.py"], None),
        ("import keras", ["{python}", "-I", "script.py"], None),
        ("import keras", ["{python}", "-c", "import keras"], None),
        ("import keras", ["{python}", "missing.py"], None),
        ("import keras", ["{python}", "-m", "missing"], None),
        ("import keras", ["{python}"], None),
        ("import keras", ["sh", "script.py"], None),
        ("import keras", ["missing", "script.py"], None),
        ("import keras", ["other/python", "script.py"], None),
    ],
)
def test_the_spare_imports_what_the_text_of_a_command_imports(tmp_path, monkeypatch, text, words, modules):
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    plan = warm.plan_imports([word.format(python=sys.executable) for word in words])
    assert plan == (modules and (str(tmp_path), modules))


@pytest.mark.parametrize(
    ("variables", "files"),
    [
        ({"TF_ENABLE_ONEDNN_OPTS": "0"}, []),
        ({"OMP_NUM_THREADS": "7"}, []),
        ({}, ["numpy.py"]),
        ({}, ["absl/__init__.py"]),
    ],
)
def test_a_task_whose_imports_differ_is_spawned(folder, spare, variables, files):
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    command = [sys.executable, "script.py"]
    here, environ = spare(command)
    environ |= {"TFDIST_KIND": "code", **variables}
    assert run(folder, command, environ, here.start)[:2] == ("Popen", 75)


def test_a_task_and_its_exit_code_survive_the_spare(folder, spare):
    script = """
import keras, psutil, sys
spare = psutil.Process().parents()[1]
spare.kill()
while spare.is_running() and spare.status() != psutil.STATUS_ZOMBIE:
    pass
sys.exit(75)
"""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    here, environ = spare(command)
    environ["TF_CONFIG"] = '{"task": {"type": "worker", "index": 1}}'
    assert run(folder, command, environ, here.start)[:2] == ("ForkedProcess", 75)


LIFE = """
import importlib
is_forked = "keras" in sys.modules
progress = importlib.import_module("tfdist.runtime.report.progress")
life = str(progress.restarts())
import keras, numpy, psutil, random
say(json.dumps([life, is_forked, random.random(), numpy.random.rand(), float(keras.random.uniform(()))]))
pathlib.Path(f"there-{life}-{TASK['index']}").write_text("all is said")
await_file(f"there-{life}-{1 - TASK['index']}")
"""


def spare_of(launcher):
    """Returns the spare of a launcher."""
    return next(each for each in psutil.Process(launcher).children() if "launch/spare.py" in " ".join(each.cmdline()))


def test_restarts_fork_until_the_spare_is_killed(job, keras):
    code = f"""{LIFE}
if life == "1" and TASK["index"]:
    spare = psutil.Process(os.getppid()).parent()  # the parent waits for the task, and is the spare's child
    assert "launch/spare.py" in " ".join(spare.cmdline()), "the task was not forked"
    spare.kill()
if life != "2":
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert job.run(code, "--workers=2", "--max_restarts=2") == 0, job.output()
    lines = [
        json.loads(line) for task in ("worker-0", "worker-1") for line in job.log(task).splitlines() if "[" in line[:1]
    ]
    assert [line[:2] for line in lines] == 2 * [["0", True], ["1", True], ["2", False]]
    drawn = [number for line in lines for number in line[2:]]
    assert len(set(drawn)) == len(drawn)
    assert not job.alive()


@pytest.mark.parametrize("ends", ["SIGKILL", "SIGINT"])
def test_no_process_survives_the_launcher(job, keras, ends):
    launcher = job.start(f"{LIFE}\nsleep_for_ever()", "--workers=2", "--max_restarts=3")
    until(lambda: all(pathlib.Path(job.folder, f"there-0-{index}").exists() for index in (0, 1)))
    spare = spare_of(launcher.pid)
    launcher.send_signal(getattr(signal, ends))
    assert launcher.wait(60) in (-signal.SIGKILL, 130)
    until(lambda: not job.alive() and not spare.is_running())


def test_without_a_spare_tasks_are_spawned(job, keras):
    assert job.run(LIFE, "--workers=2", "--warm=0") == 0
    assert '["0", false' in job.log("worker-0")
