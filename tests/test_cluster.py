"""ClusterSpec, TaskSpec, the TF_CONFIG codec and `python -m tfdist.cluster`."""

from __future__ import annotations

import json
import shlex
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist import cluster
from tfdist.cluster import ClusterSpec, TaskSpec, from_environment, from_tf_config
from tfdist.errors import ConfigError

WORKERS = {"worker": ["h0:1", "h1:2"]}
TASK = {"type": "worker", "index": 0}


def tf_config(jobs, task=TASK):
    return json.dumps({"cluster": jobs, "task": task})


def faults(text):
    with pytest.raises(ConfigError) as raised:
        from_tf_config(text)
    return raised.value.faults


def test_tf_config_round_trips():
    spec = ClusterSpec({"ps": ["h3:3"], "worker": ["h1:1", "h2:2"], "chief": ["h0:1"]})
    for task in spec.tasks():
        assert from_tf_config(spec.to_tf_config(task)) == (spec, task)


def test_jobs_are_in_one_order_and_empty_ones_left_out():
    spec = ClusterSpec({"ps": [], "worker": ["h1:1"], "chief": ["h0:1"]})
    assert list(spec.jobs.items()) == [("chief", ("h0:1",)), ("worker", ("h1:1",))]
    assert spec == ClusterSpec({"chief": ["h0:1"], "worker": ["h1:1"]})


def test_tasks_come_chief_first_and_know_their_names_and_addresses():
    spec = ClusterSpec({"ps": ["p:1"], "worker": ["w:1", "w:2"], "chief": ["c:1"]})
    assert [str(task) for task in spec.tasks()] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert [task.name for task in spec.training_tasks()] == ["chief-0", "worker-0", "worker-1"]
    assert spec.address(TaskSpec("worker", 1)) == "w:2"


def test_the_first_worker_is_chief_where_there_is_no_chief_job():
    assert ClusterSpec(WORKERS).chief == TaskSpec("worker", 0)
    assert ClusterSpec({**WORKERS, "chief": ["c:1"]}).chief == TaskSpec("chief", 0)


def test_an_evaluator_is_left_out_of_the_cluster_but_may_be_this_process():
    jobs = {**WORKERS, "evaluator": ["e:1"]}
    spec, task = from_tf_config(tf_config(jobs, {"type": "evaluator", "index": 0}))
    assert (spec, task) == (ClusterSpec(WORKERS), TaskSpec("evaluator", 0))
    assert from_tf_config(spec.to_tf_config(task)) == (spec, task)


def test_an_index_may_be_a_text_as_schedulers_write_it():
    assert from_tf_config(tf_config(WORKERS, {"type": "worker", "index": "1"}))[1] == TaskSpec("worker", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "TF_CONFIG is not JSON"),
        ("[" * 100_000, "TF_CONFIG is not JSON"),
        ("[1]", "must be a JSON object with 'cluster' and 'task'. Received: [1]"),
        ('{"task": {"type": "worker", "index": 0}}', "'cluster' must be an object"),
        (tf_config({}), "'cluster' must be an object"),
        (tf_config(["h:1"]), "'cluster' must be an object"),
        (tf_config({"worker": "h:1"}), "Job 'worker' must be a list of 'host:port'. Received: 'h:1'"),
        (tf_config({"worker_hosts": ["h:1"], **WORKERS}), "unknown job 'worker_hosts'; did you mean 'worker'?"),
        (
            tf_config({"ps": ["h:1"]}, {"type": "ps", "index": 0}),
            "needs a worker or a chief to train. Received: jobs ps.",
        ),
        (tf_config({"chief": ["h:1", "h:2"]}, {"type": "chief", "index": 0}), "at most one chief. Received: 2."),
        (tf_config({"worker": ["grpc://h:1"]}), "worker:0: address 'grpc://h:1' has a scheme; write 'h:1'."),
        (tf_config({"worker": ["me@h:1"]}), "worker:0: address 'me@h:1' has a user; write 'h:1'."),
        (tf_config({"worker": ["h:1", "h:1"]}), "worker:1: address 'h:1' is already that of worker:0"),
        (tf_config({"worker": ["h:1"], "ps": ["h:1"]}), "ps:0: address 'h:1' is already that of worker:0"),
        (tf_config({"worker": ["h:0"]}), "port 0 of 'h:0' is out of range; expected 1 to 65535."),
        (tf_config({"worker": ["h:65536"]}), "port 65536 of 'h:65536' is out of range"),
        (tf_config({"worker": ["h:" + "9" * 5000]}), "is out of range"),
        (tf_config({"worker": ["h"]}), "address 'h' is not 'host:port'"),
        (tf_config({"worker": ["::1:80"]}), "address '::1:80' is not 'host:port'"),
        (tf_config({"worker": [7]}), "worker:0: an address is a text 'host:port'. Received: 7"),
        (tf_config(WORKERS, None), "TF_CONFIG has no 'task'"),
        (tf_config(WORKERS, {"type": "worker"}), "'task' must have a 'type' (a job's name) and an 'index'"),
        (tf_config(WORKERS, {"type": "worker", "index": True}), "'task' must have a 'type'"),
        (tf_config(WORKERS, {"type": "worker", "index": 1.0}), "'task' must have a 'type'"),
        (tf_config(WORKERS, {"type": "worker", "index": "9" * 5000}), "'task' must have a 'type'"),
        (
            tf_config(WORKERS, {"type": "worker", "index": 2}),
            "index 2 is out of range; job 'worker' has 2 tasks, 0 to 1.",
        ),
        (tf_config(WORKERS, {"type": "worker", "index": -1}), "index -1 is out of range"),
        (tf_config(WORKERS, {"type": "chief", "index": 0}), "no job 'chief' in the cluster, which has: worker."),
        (tf_config(WORKERS, {"type": "wroker", "index": 0}), "unknown task type 'wroker'; did you mean 'worker'?"),
        (tf_config(WORKERS, {"type": "evaluator", "index": -1}), "expected 0 or more."),
    ],
)
def test_a_fault_is_named(text, said):
    found = faults(text)
    assert len(found) == 1
    assert said in found[0]


def test_every_fault_is_reported_at_once():
    jobs = {
        "worker_hosts": ["a:1"],
        "worker": ["http://h:1", "u@h:2", "h:3", "h:3", "h:70000"],
        "chief": ["x:1", "y:1"],
    }
    said = "\n".join(found := faults(tf_config(jobs, {"type": "worker", "index": 9})))
    assert len(found) == 7
    for part in ("did you mean 'worker'", "scheme", "user", "already", "70000", "at most one chief", "index 9"):
        assert part in said


def test_a_spec_checks_itself_and_the_task_that_it_is_written_for():
    with pytest.raises(ConfigError, match="is already that of worker:0"):
        ClusterSpec({"worker": ["h:1", "h:1"]})
    with pytest.raises(ConfigError, match="index 2 is out of range"):
        ClusterSpec(WORKERS).to_tf_config(TaskSpec("worker", 2))


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " {} "}])
def test_no_tf_config_is_no_cluster(environ):
    assert from_environment(environ) is None


def test_ports_are_free_and_different():
    ports = cluster.free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as s:
            s.bind(("", port))


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as s:
        s.bind(("", 0))
        taken = s.getsockname()[1]
        free = cluster.free_ports(1)[0]
        monkeypatch.setattr(cluster.random.SystemRandom, "sample", lambda *_: [taken, free])
        assert cluster.free_ports(1) == [free]
        with pytest.raises(ConfigError, match=r"No 2 free ports .* 1 were found"):
            cluster.free_ports(2)


def test_a_local_cluster_has_a_chief_on_top_with_parameter_servers_only():
    sizes = [{job: len(a) for job, a in cluster.local_cluster(2, ps).jobs.items()} for ps in (0, 1)]
    assert sizes == [{"worker": 2}, {"chief": 1, "worker": 2, "ps": 1}]
    with pytest.raises(ConfigError, match="workers=0, ps=-1"):
        cluster.local_cluster(0, -1)


def run(capsys, *arguments):
    code = cluster.main(["cluster", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_prints_a_table_with_chief_and_this_process(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(WORKERS, {"type": "worker", "index": 1}))
    code, out, _ = run(capsys, "show")
    rows = [line.split(None, 2) for line in out.splitlines()[2:]]
    assert code == 0
    assert rows == [["worker:0", "h0:1", "chief"], ["worker:1", "h1:2", "this process"]]


def test_show_env_evaluates_to_the_same_tf_config(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(WORKERS))
    before = from_environment()
    name, _, value = shlex.split(run(capsys, "show", "--format=env")[1])[0].partition("=")
    monkeypatch.setenv(name, value)
    assert from_environment() == before is not None


def test_show_json_has_cluster_task_and_chief(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({**WORKERS, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 0}))
    shown = json.loads(run(capsys, "show", "--format=json")[1])
    assert shown == {
        "source": "TF_CONFIG",
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


@pytest.mark.parametrize("arguments", [[], ["shwo"], ["show", "check"], ["show", "--format=xml"], ["show", "--bogus"]])
def test_a_faulty_command_line_ends_with_2(capsys, monkeypatch, arguments):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
jobs = st.sampled_from(["chief", "worker", "ps", "evaluator", "worker_hosts"])
addresses = st.one_of(st.from_regex(r"[a-c]:[1-9]", fullmatch=True), st.text(max_size=8), json_values)
nearly_valid = st.fixed_dictionaries(
    {
        "cluster": st.dictionaries(jobs, st.lists(addresses, max_size=3) | json_values, max_size=3),
        "task": st.fixed_dictionaries({"type": jobs | json_values, "index": st.integers(-1, 3) | json_values}),
    }
)


@given(st.one_of(st.text(), json_values.map(json.dumps), nearly_valid.map(json.dumps)))
def test_any_text_gives_a_cluster_or_a_config_error(text):
    try:
        spec, task = from_tf_config(text)
    except ConfigError as e:
        assert e.faults and all(e.faults)
    else:
        assert task.type == "evaluator" or task in spec.tasks()


@given(st.integers(0, 1), st.integers(0, 5), st.integers(0, 3), st.data())
def test_any_valid_cluster_round_trips(chiefs, workers, ps, data):
    count = chiefs + max(workers, 1 - chiefs) + ps
    names = data.draw(st.lists(st.from_regex(r"[a-z0-9.-]{1,9}", fullmatch=True), min_size=count, max_size=count))
    ports = data.draw(st.lists(st.integers(1, 65535), min_size=count, max_size=count, unique=True))
    hosts = iter(f"{name}:{port}" for name, port in zip(names, ports, strict=True))
    sizes = {"chief": chiefs, "worker": max(workers, 1 - chiefs), "ps": ps}
    spec = ClusterSpec({job: [next(hosts) for _ in range(size)] for job, size in sizes.items()})
    task = data.draw(st.sampled_from(spec.tasks()))
    assert from_tf_config(spec.to_tf_config(task)) == (spec, task)
