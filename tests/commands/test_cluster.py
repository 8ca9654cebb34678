"""`tfdist cluster`: what it shows and checks of the environment's cluster."""

from __future__ import annotations

import json
import os
import shlex

import pytest

from tests.cluster.test_spec import WORKERS, tf_config
from tfdist.cluster import ClusterSpec, TaskSpec, free_ports, greeting
from tfdist.cluster.resolvers import discovery
from tfdist.commands.cluster import main


def run(capsys, *arguments):
    code = main(["cluster", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_prints_a_table_with_chief_and_this_process(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(WORKERS, {"type": "worker", "index": 1}))
    code, out, _ = run(capsys, "show")
    rows = [line.split(None, 2) for line in out.splitlines()[3:]]
    assert code == 0 and out.startswith("from tf_config\n  TF_CONFIG={")
    assert rows == [["worker:0", "h0:1", "chief"], ["worker:1", "h1:2", "this process"]]


def test_show_env_evaluates_to_the_same_tf_config(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(WORKERS))
    before = discovery.find_cluster()
    name, _, value = shlex.split(run(capsys, "show", "--format=env")[1])[0].partition("=")
    monkeypatch.setenv(name, value)
    assert discovery.find_cluster() == before is not None


def test_show_json_has_cluster_task_and_chief(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({**WORKERS, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 0}))
    shown = json.loads(run(capsys, "show", "--format=json")[1])
    assert shown == {
        "source": "tf_config",
        "variables": {"TF_CONFIG": os.environ["TF_CONFIG"]},
        "environ": {},
        "cluster": WORKERS,
        "task": {"type": "evaluator", "index": 0},
        "chief": "worker:0",
    }


def test_without_a_cluster_show_and_check_say_so(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert "one process on this machine" in run(capsys, "show")[1]
    assert json.loads(run(capsys, "show", "--format=json")[1])["cluster"] is None
    assert run(capsys, "check") == (0, "OK: no cluster in the environment\n", "")


def test_check_accepts_a_sound_cluster_and_ends_with_2_at_faults(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(WORKERS))
    assert run(capsys, "check") == (0, "OK: worker:0 of 2 tasks\n", "")
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": ["grpc://h:1", "h:0"]}))
    code, out, err = run(capsys, "check")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("jobs", "lacking"),
    [
        (None, "job 'chief' and 'worker' and 'ps'. Received: no job."),
        ({"worker": ["h:1"]}, "job 'chief' and 'ps'. Received: worker (1)."),
        ({"chief": ["h:3"], "worker": ["h:1"]}, "job 'ps'. Received: chief (1), worker (1)."),
    ],
)
def test_check_knows_what_a_strategy_needs(capsys, monkeypatch, jobs, lacking):
    if jobs is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", tf_config(jobs))
    assert run(capsys, "check")[0] == 0
    code, out, err = run(capsys, "check", "--strategy=parameter_server")
    assert (code, out) == (2, "") and err.endswith(f"add addresses to {lacking}\n")
    monkeypatch.setenv("TF_CONFIG", tf_config({"chief": ["h:3"], "worker": ["h:1"], "ps": ["h:2"]}))
    assert run(capsys, "check", "--strategy=parameter_server") == (0, "OK: worker:0 of 3 tasks\n", "")


@pytest.mark.parametrize("arguments", [[], ["shwo"], ["show", "check"], ["show", "--format=xml"], ["show", "--bogus"]])
def test_a_faulty_command_line_ends_with_2(capsys, monkeypatch, arguments):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err


def test_check_connects(capsys, monkeypatch):
    """To the others, of which one is there as a task says it, and one is not."""
    own, other, absent = (f"127.0.0.1:{port}" for port in free_ports(3))
    spec = ClusterSpec({"worker": [own, other]})
    monkeypatch.setenv("TF_CONFIG", spec.to_tf_config(TaskSpec("worker", 0)))
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    monkeypatch.setenv("https_proxy", "http://bob:hunt/er@2@proxy:2")
    with greeting.listening_for_peers(spec, TaskSpec("worker", 1)):
        code, out, err = run(capsys, "check", "--connect", "--timeout=2")
    assert (code, err) == (0, "")
    assert "http_proxy=http://proxy:1" in out and "https_proxy=proxy:2" in out and "hunt" not in out
    assert out.startswith("worker:0 of 2 tasks\n") and out.endswith("OK: all tasks can be reached\n")
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": [own, absent]}))
    code, out, err = run(capsys, "check", "--connect", "--timeout=1")
    assert code == 1 and f"worker:1 at {absent} (connection refused)" in err and "OK" not in out


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_wait_of_no_length_is_refused(capsys, seconds):
    code, out, err = run(capsys, "check", f"--timeout={seconds}")
    assert (code, out) == (2, "") and "--timeout must be 0 or more seconds, and finite" in err
