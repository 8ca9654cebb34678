"""ClusterSpec, TaskSpec and the TF_CONFIG codec."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import ClusterSpec, TaskSpec, from_tf_config
from tfdist.cluster.resolvers import discovery
from tfdist.commands.cluster import main
from tfdist.errors import ConfigError

WORKERS = {"worker": ["h0:1", "h1:2"]}
TASK = {"type": "worker", "index": 0}


def from_environment(environ):
    """The cluster and task of an environment, or None."""
    found = discovery.resolve(environ)
    return found and (found.cluster, found.task)


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
        ("null", "must be a JSON object with 'cluster' and 'task'. Received: null"),
        ('{"a\nb', r'Received: {"a\nb'),
        ('{"cluster": {"worker": ["h:1"]}, "tsk": {}}', '\'task\' is missing: add {"type": "worker", "index": 0}'),
        ('{"clutser": {}, "task": {"type": "worker", "index": 0}}', 'add {"worker": ["host0:2222", '),
        ('{"clutser": {}, "task": {"type": "worker", "index": 0}}', "Received: 'clutser', 'task'"),
        ('{"sparseCluster": {"worker": {"1": "w1:1"}}, "task": {}}', "leave enableDynamicWorker out of the TFJob"),
        (tf_config({}), "'cluster' must be an object"),
        (tf_config(["h:1"]), "'cluster' must be an object"),
        (tf_config({"worker": "h:1"}), "job 'worker' must be a list of 'host:port'. Received: 'h:1'"),
        (tf_config({"worker": {"1": "h:1"}}), "job 'worker' must be a list of 'host:port'. Received: {'1': 'h:1'}"),
        (tf_config({"worker_hosts": ["h:1"]}), "unknown job 'worker_hosts'; did you mean 'worker'?"),
        (tf_config({"work\ner": ["h:1"]}), r"unknown job 'work\ner'; did you mean 'worker'?"),
        (tf_config({"worker": []}), "add addresses to job 'worker'. Received: worker (0)."),
        (tf_config({"worker_hosts": ["h:1"], **WORKERS}), "unknown job 'worker_hosts'; did you mean 'worker'?"),
        (
            tf_config({"ps": ["h:1"]}, {"type": "ps", "index": 0}),
            "needs a chief, which coordinates, a worker and a ps: add addresses to job 'chief' and 'worker'. Received: ps (1).",
        ),
        (
            tf_config({"worker": ["h:1"], "ps": ["h:2"]}),
            "add addresses to job 'chief'. Received: worker (1), ps (1).",
        ),
        (
            tf_config({"chief": ["h:1"], "ps": ["h:2"]}, {"type": "chief", "index": 0}),
            "add addresses to job 'worker'. Received: chief (1), ps (1).",
        ),
        (
            tf_config({"chief": ["h:1"], "worker": ["h:2"], "ps": []}),
            "add addresses to job 'ps'. Received: chief (1), worker (1), ps (0).",
        ),
        (
            tf_config({"chief": ["h:1", "h:2"]}, {"type": "chief", "index": 0}),
            "at most one chief; make the others workers. Received: 2.",
        ),
        (tf_config({"worker": ["grpc://h:1"]}), "worker:0: address 'grpc://h:1' has a scheme; write 'h:1'."),
        (tf_config({"worker": ["me@h:1"]}), "worker:0: address 'me@h:1' has a user; write 'h:1'."),
        (tf_config({"worker": ["ssh://me@h:1/x"]}), "address 'ssh://me@h:1/x' has a scheme and a user; write 'h:1'."),
        (tf_config({"worker": ["http://h"]}), "has a scheme; write 'host:port', such as 'host1:2222'."),
        (tf_config({"worker": ["h:1", "h:1"]}), "worker:1: address 'h:1' is already that of worker:0"),
        (tf_config({"worker": ["h:1", "H:01"]}), "worker:1: address 'H:01' is already that of worker:0"),
        (
            tf_config({"chief": ["c:1"], "worker": ["h:1"], "ps": ["h:1"]}),
            "ps:0: address 'h:1' is already that of worker:0",
        ),
        (
            tf_config({"worker": ["h:1", "localhost:2"]}),
            "worker:1: address 'localhost:2' is each host's own, but worker:0 is at 'h:1'; write a name",
        ),
        *(
            (
                tf_config({"worker": ["h:1", f"{own}:2"]}),
                f"worker:1: address '{own}:2' is each host's own, but worker:0",
            )
            for own in ("0.0.0.0", "127.1", "[::]", "[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]")
        ),
        (tf_config({"worker": ["h:0"]}), "port 0 of 'h:0' is out of range; expected 1 to 65535."),
        (tf_config({"worker": ["h:65536"]}), "port 65536 of 'h:65536' is out of range"),
        (tf_config({"worker": ["h:" + "9" * 5000]}), "is out of range"),
        (tf_config({"worker": ["h:00000000000"]}), "is out of range"),
        (tf_config({"worker": ["h"]}), "address 'h' is not 'host:port'"),
        (tf_config({"worker": ["::1:80"]}), "address '::1:80' is not 'host:port'"),
        (tf_config({"worker": [7]}), "worker:0: an address is a text 'host:port'. Received: 7"),
        (tf_config(WORKERS, None), '\'task\' must be an object such as {"type": "worker", "index": 0}'),
        (tf_config(WORKERS, "worker"), 'with the index of this process. Received: "worker"'),
        (tf_config(WORKERS, {"type": 3, "index": 0}), "'task' must have a 'type'"),
        (tf_config(WORKERS, {"type": "worker", "index": 10**30}), "'task' must have a 'type'"),
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
        (tf_config(WORKERS, {"type": "\ud800\n", "index": 0}), r"unknown task type '\ud800\n'."),
        (tf_config(WORKERS, {"type": "x" * 5000, "index": 0}), "...."),
        (tf_config(WORKERS, {"type": "evaluator", "index": -1}), "expected 0 or more."),
        (
            tf_config({**WORKERS, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 1}),
            "index 1 is out of range; job 'evaluator' has 1 tasks, 0 to 0.",
        ),
    ],
)
def test_a_fault_is_named(text, said, capsys, monkeypatch):
    found = faults(text)
    assert len(found) == 1
    assert said in found[0]
    assert found[0].startswith("TF_CONFIG") and found[0].isprintable() and len(found[0]) < 500
    monkeypatch.setenv("TF_CONFIG", text)
    assert main(["cluster", "check"]) == 2
    assert capsys.readouterr() == ("", f"{found[0]}\n")


@pytest.mark.parametrize("address", ["h:1", "h-1.example.com:65535", "10.0.0.1:80", "[::1]:80", "[fe80::1%eth0]:80"])
def test_an_address_is_sound(address):
    assert from_tf_config(tf_config({"worker": [address]}))[0].jobs == {"worker": (address,)}


def test_every_fault_is_reported_at_once():
    assert [part in fault for part, fault in zip(("'cluster'", "'task'"), faults('{"a": 1}'), strict=True)] == [
        True
    ] * 2
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


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " {} "}, {"TF_CONFIG": "{\n}"}])
def test_no_tf_config_is_no_cluster(environ):
    assert from_environment(environ) is None


any_text = st.text(st.characters(), max_size=20)  # with surrogates
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=10,
)
jobs = st.sampled_from(["chief", "worker", "ps", "evaluator", "worker_hosts"])
addresses = st.one_of(st.from_regex(r"[a-c]:[1-9]", fullmatch=True), any_text, json_values)
nearly_valid = st.fixed_dictionaries(
    {
        "cluster": st.dictionaries(jobs, st.lists(addresses, max_size=3) | json_values, max_size=3),
        "task": st.fixed_dictionaries({"type": jobs | json_values, "index": st.integers(-1, 3) | json_values}),
    }
)


@st.composite
def valid(draw):
    """A cluster and one of its tasks."""
    names = st.from_regex(r"[a-k][a-z0-9.-]{0,8}|\[[0-9a-f:]{2,9}\]", fullmatch=True)
    names = names.filter(lambda name: name != "[::1]")  # which is no other host's
    addresses = st.builds("{}:{}".format, names, st.integers(1, 65535))
    hosts = draw(st.lists(addresses, min_size=1, max_size=6, unique=True))
    ps = draw(st.integers(0, max(len(hosts) - 2, 0)))
    chiefs = 1 if ps else draw(st.integers(0, 1))
    rest = hosts[chiefs:]
    spec = ClusterSpec({"chief": hosts[:chiefs], "worker": rest[: len(rest) - ps], "ps": rest[len(rest) - ps :]})
    return spec, draw(st.sampled_from(spec.tasks()))


def check_sentences(error):
    assert error.faults
    for fault in error.faults:
        assert fault.strip() and fault.isprintable()


@settings(max_examples=25)
@given(st.one_of(any_text, json_values.map(json.dumps), nearly_valid.map(json.dumps)))
def test_any_text_gives_a_cluster_or_a_config_error(text):
    try:
        found = from_environment({"TF_CONFIG": text})
    except ConfigError as e:
        check_sentences(e)
    else:
        assert found is None or found[1].type == "evaluator" or found[1] in found[0].tasks()


@settings(max_examples=25)
@given(valid())
def test_any_valid_cluster_round_trips(found):
    spec, task = found
    assert from_tf_config(spec.to_tf_config(task)) == found
    assert from_environment({"TF_CONFIG": spec.to_tf_config(task)}) == found


def change_address(change):
    def corrupt(config):
        addresses = next(iter(config["cluster"].values()))
        addresses[-1] = change(addresses[-1])

    return corrupt


CORRUPTIONS = {
    "scheme": change_address("grpc://{}".format),
    "user": change_address("user@{}".format),
    "port": change_address("{}000000".format),
    "no port": change_address(lambda address: "host"),
    "no text": change_address(lambda address: [address]),
    "duplicate": lambda config: next(iter(config["cluster"].values())).append(
        next(address for addresses in config["cluster"].values() for address in addresses)
    ),
    "index": lambda config: config["task"].update(index=9),
    "no index": lambda config: config["task"].update(index=None),
    "type": lambda config: config["task"].update(type="wroker"),
    "worker_hosts": lambda config: config["cluster"].update(worker_hosts=config["cluster"].pop("worker", [])),
    "no list": lambda config: config["cluster"].update(ps={"1": "host:2222"}),
    "no ps": lambda config: config["cluster"].update(ps=[]),
}


@settings(max_examples=25)
@given(valid(), st.sets(st.sampled_from(list(CORRUPTIONS)), min_size=1, max_size=3))
def test_a_valid_cluster_that_is_corrupted_is_a_config_error(found, names):
    spec, task = found
    config = json.loads(spec.to_tf_config(task))
    for name in filter(names.__contains__, CORRUPTIONS):
        CORRUPTIONS[name](config)
    with pytest.raises(ConfigError) as raised:
        from_tf_config(json.dumps(config))
    check_sentences(raised.value)


@settings(max_examples=25)
@given(valid(), st.sampled_from(["cluster", "task"]), json_values)
def test_a_part_that_is_missing_or_anything_else_is_a_config_error(found, part, value):
    config = json.loads(found[0].to_tf_config(found[1]))
    config[part] = [value]
    with pytest.raises(ConfigError, match=f"'{part}' must be an object"):
        from_tf_config(json.dumps(config))
    del config[part]
    with pytest.raises(ConfigError, match=f"'{part}' is missing"):
        from_tf_config(json.dumps(config))


@settings(max_examples=25)
@given(valid(), st.text(st.characters(), min_size=1, max_size=3), st.integers(0, 300))
def test_a_text_cut_off_or_spoiled_never_gives_another_error(found, piece, at):
    text = found[0].to_tf_config(found[1])
    for spoiled in (text[:at], text[:at] + piece + text[at:], text[at:]):
        try:
            from_environment({"TF_CONFIG": spoiled})
        except ConfigError as e:
            check_sentences(e)
