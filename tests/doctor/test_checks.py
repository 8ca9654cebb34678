"""What `tfdist doctor` checks is found in an environment that has it, with a remedy."""

from __future__ import annotations

import json
import os
import socket

import pytest

from tests.helpers.full_disk import mounted
from tfdist.cluster import free_ports
from tfdist.doctor import checks
from tfdist.doctor.checks import ERROR, OK, WARNING


def tf_config(addresses, index=0):
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def found(check, environ):
    """Returns the findings of a check by what was looked at, each of which says what to do unless all is well."""
    findings = list(check(environ))
    assert all(each.remedy for each in findings if each.level != OK)
    return {each.what: each for each in findings}


@pytest.mark.parametrize(
    ("environ", "level", "value"),
    [
        ({}, OK, "none"),
        ({"TF_CONFIG": "{}"}, OK, "none"),
        ({"TF_CONFIG": '{"cluster": 3}'}, ERROR, "TF_CONFIG: 'task' is missing"),
        ({"TF_CONFIG": "{no json"}, ERROR, "TF_CONFIG"),
        ({"SLURM_NTASKS": "4"}, WARNING, "none"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "x"}, ERROR, "slurm: "),
        ({"TF_CONFIG": tf_config(["me:secret@h:1", "i:1"])}, ERROR, "TF_CONFIG: worker:0: address 'h:1'"),
    ],
)
def test_clusters(environ, level, value):
    finding = found(checks.cluster, environ)["cluster"]
    assert finding.level == level
    assert finding.value.startswith(value)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:  # which nobody takes once it is closed
        number = server.getsockname()[1]
        environ = {"TF_CONFIG": tf_config([f"127.0.0.1:{number}", "127.0.0.1:1"])}
        finding = found(checks.cluster, environ)["own port"]
        assert finding.level == ERROR
        assert f"port {number} is taken by pid {os.getpid()}" in finding.value
    assert found(checks.cluster, environ)["own port"].level == OK


def test_shared_memory(tmp_path, monkeypatch):
    assert found(checks.shared_memory, {}).keys() == {"/dev/shm"}
    usage = checks.shutil.disk_usage
    with mounted(tmp_path, 8192):
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(tmp_path))
        assert found(checks.shared_memory, {})["/dev/shm"].level == WARNING
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(tmp_path / "gone"))
    assert found(checks.shared_memory, {})["/dev/shm"].value == "No such file or directory"


def test_versions(tmp_path, monkeypatch):
    assert {each.level for each in found(checks.versions, {}).values()} == {OK}
    assert found(checks.versions, {"KERAS_BACKEND": "j\x1bax"})["KERAS_BACKEND"][::2] == (ERROR, r"j\x1bax")
    older = tmp_path / "tensorflow-2.17.0.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.17.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = found(checks.versions, {})["TensorFlow"]
    assert (finding.level, finding.value.startswith("2.17.0; ")) == (WARNING, True)
    assert finding.remedy.startswith("pip install 'tensorflow<2.23,>=2.18")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libcuda is broken')", "exit code 1: ImportError: libcuda is broken"),
        ("import os\nos.kill(os.getpid(), 11)", "exit code -11: no message"),
        ("import time\ntime.sleep(120)", "no answer within 0 s"),
    ],
)
def test_a_tensorflow_that_cannot_be_loaded_ends_its_process_or_hangs_is_told(tmp_path, monkeypatch, code, said):
    monkeypatch.setattr(checks, "LIMIT", 0.4 if "sleep" in code else 60)
    (tmp_path / "tensorflow.py").write_text(code)
    finding = found(checks.devices, {**os.environ, "PYTHONPATH": str(tmp_path)})["devices"]
    assert (finding.level, finding.value.endswith(said)) == (ERROR, True), finding
