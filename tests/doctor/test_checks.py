"""Each pitfall that `tfdist doctor` knows is found in an environment that has it, with a remedy."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.full_disk import mounted
from tests.helpers.unprivileged import open_folder, unprivileged
from tfdist.cluster import free_ports
from tfdist.commands import doctor
from tfdist.doctor import cluster, devices, machine, software
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, shorten
from tfdist.runtime.report import progress


def tf_config(addresses, index=0):
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def found(check, environ):
    """Returns the findings of a check by what was looked at, each of which says what to do unless all is well."""
    findings = list(check(environ))
    assert all(each.remedy for each in findings if each.level != OK)
    return {each.what: each for each in findings}


@pytest.mark.parametrize(
    ("environ", "what", "level", "value"),
    [
        ({"KERAS_BACKEND": "jax"}, "KERAS_BACKEND", ERROR, "jax"),
        ({"KERAS_BACKEND": "tensorflow"}, "KERAS_BACKEND", OK, "tensorflow"),
        ({"TF_USE_LEGACY_KERAS": "1"}, "TF_USE_LEGACY_KERAS", WARNING, "1"),
        ({"TF_CPP_MIN_LOG_LEVEL": "3"}, "TF_CPP_MIN_LOG_LEVEL", WARNING, "3"),
        ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "TF_CPP_MIN_LOG_LEVEL", NOTE, "0"),
        ({"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS", NOTE, "4"),
        ({"OMP_NUM_THREADS": "4,2"}, "OMP_NUM_THREADS", NOTE, "4,2"),
        ({"TF_NUM_INTEROP_THREADS": "many"}, "TF_NUM_INTEROP_THREADS", WARNING, "many"),
        ({"TF_DETERMINISTIC_OPS": "1"}, "TF_DETERMINISTIC_OPS", NOTE, "1"),
        ({"TF_GPU_THREAD_MODE": "gpu_private"}, "TF_GPU_THREAD_MODE", NOTE, "gpu_private"),
        ({"NCCL_DEBUG": "a\x1b[2J"}, "NCCL_DEBUG", NOTE, r"a\x1b[2J"),
        ({"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX", NOTE, "1"),
        ({"http_proxy": "http://me:secr@t@proxy:3128"}, "proxies", NOTE, "http_proxy=proxy:3128"),
        ({}, "proxies", OK, "none"),
    ],
)
def test_settings(environ, what, level, value):
    findings = found(software.settings, environ)
    assert findings[what][:3] == (level, what, value)
    assert "secr" not in str(findings)


def test_no_other_variable_is_shown():
    assert "hunter2" not in str(list(software.settings({"API_TOKEN": "hunter2", "PASSWORD": "hunter2"})))


@pytest.mark.parametrize(
    ("text", "level"),
    [('{"backend": "jax"}', ERROR), ('{"backend": "tensorflow"}', OK), ("{", WARNING), ("[]", WARNING)],
)
def test_the_backend_of_keras_own_file(tmp_path, text, level):
    (tmp_path / "keras.json").write_text(text)
    assert software.keras_backend({"KERAS_HOME": str(tmp_path)}).level == level


@pytest.mark.parametrize(
    ("environ", "what", "level", "value"),
    [
        ({}, "cluster", OK, "none"),
        ({"TF_CONFIG": "{}"}, "cluster", OK, "none"),
        ({"TF_CONFIG": '{"cluster": 3}'}, "cluster", ERROR, "TF_CONFIG: 'task' is missing"),
        ({"TF_CONFIG": "{no json"}, "cluster", ERROR, "TF_CONFIG"),
        ({"SLURM_NTASKS": "4"}, "cluster", WARNING, "none"),
        (
            {"SLURM_STEP_ID": "0", "TF_CONFIG": "{no json"},
            "TF_CONFIG",
            WARNING,
            "set together with the variables of slurm",
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "x"}, "cluster", ERROR, "slurm: "),
        ({"TF_CONFIG": tf_config(["127.0.0.1:0", "h:1"])}, "cluster", ERROR, "TF_CONFIG: "),
        ({"TF_CONFIG": tf_config(["me:secret@h:1", "i:1"])}, "cluster", ERROR, "TF_CONFIG: worker:0: address 'h:1'"),
        (
            {"TF_CONFIG": tf_config(["192.0.2.1:1", "192.0.2.2:1"])},
            "own address",
            WARNING,
            "worker:0 should be at 192.0.2.1",
        ),
        (
            {"TF_CONFIG": tf_config(["no-such.invalid:1", "192.0.2.2:1"])},
            "own address",
            WARNING,
            "no-such.invalid is not",
        ),
    ],
)
def test_clusters(environ, what, level, value):
    finding = found(cluster.check, environ)[what]
    assert finding.level == level
    assert finding.value.startswith(value)


def test_a_task_of_the_launcher_may_have_tf_config_beside_slurms_variables(tmp_path):
    environ = {"SLURM_STEP_ID": "0", "TF_CONFIG": tf_config(["localhost:1", "127.0.0.1:2"])}
    assert "TF_CONFIG" in found(cluster.check, environ)
    assert "TF_CONFIG" not in found(cluster.check, {**environ, progress.FOLDER: str(tmp_path)})


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:  # which nobody takes once it is closed
        number = server.getsockname()[1]
        environ = {"TF_CONFIG": tf_config([f"127.0.0.1:{number}", "127.0.0.1:1"])}
        finding = found(cluster.check, environ)["own port"]
        assert finding.level == ERROR
        assert f"port {number} is taken by pid {os.getpid()}" in finding.value
    assert found(cluster.check, environ)["own port"].level == OK


@pytest.mark.parametrize(
    ("own", "files", "quota", "limit"),
    [
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ("0::/\n", {"cpu.max": "150000 100000", "memory.max": "4096"}, 1.5, 4096),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000", "a/memory.max": "7"}, 0.5, 7),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000", "memory.max": "8"}, 2, 8),  # seen from a container
        (
            "4:memory:/j\n3:cpu,cpuacct:/j\n",
            {
                "memory/j/memory.limit_in_bytes": "4096",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu/j/cpu.cfs_quota_us": "300000",
                "cpu/j/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            3,
            4096,
        ),
        ("", {}, None, None),
    ],
)
def test_limits_of_cgroups(tmp_path, own, files, quota, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cpu_quota(tmp_path, own) == quota
    assert machine.memory_limit(tmp_path, own) == limit


def test_resources():
    assert machine.processors(4, 8, None)[:3] == (OK, "processors", "4 of 8")
    few = machine.processors(4, 8, 1.5)
    assert (few.level, "TF_NUM_INTRAOP_THREADS=1 " in few.remedy) == (NOTE, True)
    assert machine.available_memory(2**34, 2**35, None).level == OK
    assert machine.available_memory(2**34, 2**35, 2**29).level == WARNING
    assert machine.available_memory(2**29, 2**35, 2**34).level == WARNING
    assert machine.open_files(256).level == WARNING
    assert machine.open_files(-1).level == OK
    assert {"processors", "memory", "open files"} == found(machine.resources, {}).keys()


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings = found(machine.folders, {"TMPDIR": str(tmp_path)})
    assert [findings[what].level for what in ("current folder", "TMPDIR")] == [OK, OK]
    assert "temporary files" not in findings
    assert not list(tmp_path.iterdir())


def test_a_tmpdir_that_is_none(tmp_path):
    findings = found(machine.folders, {"TMPDIR": str(tmp_path / "gone")})
    assert findings["TMPDIR"].value == f"{shorten(str(tmp_path / 'gone'))} cannot be written: No such file or directory"
    assert findings["TMPDIR"].level == WARNING
    assert findings["temporary files"].level == OK, "Python takes the next one"


def test_a_full_disk(tmp_path):
    with mounted(tmp_path, 8192):
        (tmp_path / "fills").write_bytes(bytes(8192))
        assert machine.cannot_write(str(tmp_path)) == "No space left on device"


def test_a_folder_of_another_user():
    with open_folder() as folder:
        (folder / "closed").mkdir(mode=0o755)
        with unprivileged():
            assert machine.cannot_write(str(folder)) == ""
            assert machine.cannot_write(str(folder / "closed")) == ("Permission denied" if os.geteuid() else "")


def test_a_current_folder_that_is_gone(tmp_path):
    """In a process of its own, as others of this one need theirs."""
    (tmp_path / "gone").mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from tfdist.doctor import machine; print(next(iter(machine.folders({}))).value)"
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "gone", env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "does not exist any more\n", done.stderr


def test_versions(tmp_path, monkeypatch):
    findings = found(software.versions, {})
    assert {each.level for each in findings.values()} == {OK}
    older = tmp_path / "tensorflow-2.17.0.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.17.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = found(software.versions, {})["TensorFlow"]
    assert (finding.level, finding.value.startswith("2.17.0; ")) == (WARNING, True)
    assert finding.remedy.startswith("pip install 'tensorflow<2.23,>=2.18")
    for name in ("keras", "keras-nightly"):
        folder = tmp_path / f"{name.replace('-', '_')}-3.14.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.14.0\n")
    keras = next(each for each in software.versions({}) if each.what == "Keras")
    assert (keras.level, keras.remedy) == (ERROR, "pip uninstall keras keras-nightly, and install one of them")


@pytest.mark.parametrize(
    ("chosen", "present", "level", "value"),
    [
        (None, 2, None, None),
        ("", 2, WARNING, "(empty)"),
        ("-1", 2, WARNING, "-1"),
        ("", 0, NOTE, "(empty)"),
        ("0,1", 2, OK, "0,1"),
        ("0,2", 2, WARNING, "0,2; this machine has 0 to 1"),
        ("0,0", 2, WARNING, "0,0"),
        ("GPU-8c1f", 2, OK, "GPU-8c1f"),
        ("0", 0, NOTE, "0, but there is no NVIDIA driver"),
    ],
)
def test_visible_gpus(tmp_path, monkeypatch, chosen, present, level, value):
    """A program takes the place of nvidia-smi, as it prints on a machine with GPUs."""
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "no driver")
    program = tmp_path / "nvidia-smi"
    lines = "\n".join(f"echo 'GPU {i}: NVIDIA A100 (UUID: GPU-{i})'" for i in range(present))
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    monkeypatch.setenv("PATH", environ["PATH"])
    environ |= {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    findings = found(devices.visible, environ)
    assert [each[:3] for each in findings.values()] == ([(level, "CUDA_VISIBLE_DEVICES", value)] if level else [])


def test_a_tensorflow_that_cannot_be_loaded_or_ends_its_process_is_told(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libcuda is broken')")
    finding = found(devices.check, environ)["devices"]
    assert (finding.level, finding.value.endswith("exit code 1: ImportError: libcuda is broken")) == (ERROR, True)
    (tmp_path / "tensorflow.py").write_text("import os\nos.kill(os.getpid(), 11)")
    assert "signal 11" in found(devices.check, environ)["devices"].value


def test_a_process_that_hangs_is_ended():
    began = time.monotonic()
    assert devices.run(["sleep", "120"], os.environ, 0.2) == (None, "", "")
    assert time.monotonic() - began < 60


def test_a_check_that_hangs_or_fails_does_not_hold_up_the_others(tmp_path):
    os.mkfifo(tmp_path / "keras.json")  # whoever opens it waits
    checks = {
        "hangs": (lambda environ: [(tmp_path / "keras.json").read_text()], 0.3),
        "fails": (lambda environ: [1 / 0], 30),
        "ends": (lambda environ: [Finding(OK, "ends", "well")], 30),
    }
    findings = doctor.examine(checks, {"KERAS_HOME": str(tmp_path)})
    assert [(each.level, each.what) for each in findings] == [(WARNING, "hangs"), (WARNING, "fails"), (OK, "ends")]
    assert "ZeroDivisionError" in findings[1].value
    (tmp_path / "keras.json").write_text("{}")  # lets the thread end
    for thread in threading.enumerate():
        if thread.name == "tfdist-doctor-hangs":
            thread.join(30)


def test_reports():
    findings = [Finding(OK, "a", "1"), Finding(WARNING, "b", "2", "wait")]
    assert doctor.as_lines(findings) == "ok       a: 1\nwarning  b: 2 -> wait\nOK: 0 errors, 1 warning, 0 notes"
    assert json.loads(doctor.as_json(findings)) == {
        "ok": True,
        "findings": [
            {"level": "ok", "what": "a", "value": "1", "remedy": ""},
            {"level": "warning", "what": "b", "value": "2", "remedy": "wait"},
        ],
    }
    assert not doctor.is_ok([*findings, Finding(ERROR, "c", "3", "stop")])
