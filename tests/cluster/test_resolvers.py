"""Environments of schedulers to clusters; lists of nodes and hosts."""

from __future__ import annotations

import concurrent.futures
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.cluster.resolvers import discovery, hosts, rendezvous
from tfdist.cluster.resolvers import slurm as slurm_lib
from tfdist.errors import ClusterError, ConfigError

# Recorded from `srun -n 3 --overcommit` of Slurm 22.05 on one node.
RECORDED_SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_TASKS_PER_NODE": "3",
}
# Recorded from an sbatch script's own shell, on the same: no step, and so no task.
RECORDED_BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}
# Recorded from `srun -n 1 -w node1 : -n 2 -O -w node0`, of Slurm 22.05 on two nodes: the last task of a heterogeneous job.
RECORDED_HETEROGENEOUS = {
    "SLURMD_NODENAME": "node0",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_JOB_NODELIST_PACK_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_PACK_GROUP_1": "node0",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PACK_SIZE": "2",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# Recorded from `mpirun --oversubscribe -np 2` of Open MPI 4.1.
RECORDED_OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1439236097",
    "PMIX_NAMESPACE": "1439236097",
}


OWN = socket.gethostname()


def slurm(nodes, tasks, rank, node, local, **more):
    """Written by hand, as Slurm's manual has it."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_TASKS": str(sum(slurm_lib.tasks_per_node(tasks))),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "TFDIST_PORT": "2000",
        **more,
    }


@pytest.mark.parametrize(
    ("environ", "ps", "source", "jobs", "task"),
    [
        (
            {**RECORDED_SLURM, "TFDIST_PORT": "2000"},
            0,
            "slurm",
            {"worker": ["127.0.0.1:2000", "127.0.0.1:2001", "127.0.0.1:2002"]},
            "worker:2",
        ),
        (
            {**RECORDED_OPEN_MPI, "TFDIST_PORT": "2000"},
            0,
            "open_mpi",
            {"worker": ["127.0.0.1:2000", "127.0.0.1:2001"]},
            "worker:1",
        ),
        (
            slurm("n[009-011]", "1(x3)", 1, 1, 0),
            0,
            "slurm",
            {"worker": ["n009:2000", "n010:2000", "n011:2000"]},
            "worker:1",
        ),
        (
            slurm("n[1-3],login7", "2(x3),1", 6, 3, 0),
            2,
            "slurm",
            {
                "chief": ["n1:2000"],
                "worker": ["n1:2001", "n2:2000", "n2:2001", "n3:2000"],
                "ps": ["n3:2001", "login7:2000"],
            },
            "ps:1",
        ),
        (
            slurm("a,b", "1,2", 1, 1, 0, SLURM_DISTRIBUTION="cyclic:block"),
            0,
            "slurm",
            {"worker": ["a:2000", "b:2000", "b:2001"]},
            "worker:1",
        ),
        (
            slurm("a,b", "3,2", 2, 1, 0, SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE="2"),
            0,
            "slurm",
            {"worker": ["a:2000", "a:2001", "b:2000", "b:2001", "a:2002"]},
            "worker:2",
        ),
        (  # a step on part of the job
            slurm("n2", "2", 1, 0, 1, SLURM_JOB_NODELIST="n[1-2]", SLURM_TASKS_PER_NODE="2(x2)", SLURM_NTASKS="4"),
            0,
            "slurm",
            {"worker": ["127.0.0.1:2000", "127.0.0.1:2001"]},
            "worker:1",
        ),
        (
            {**RECORDED_HETEROGENEOUS, "TFDIST_PORT": "2000"},
            0,
            "slurm",
            {"worker": ["node1:2000", "node0:2000", "node0:2001"]},
            "worker:2",
        ),
        (  # of a heterogeneous job, a step on its second and third component
            slurm(
                "cpu1,gpu[1-2]",
                "2,1(x2)",
                3,
                2,
                1,
                SLURM_HET_SIZE="3",
                SLURM_JOB_NODELIST_HET_GROUP_0="login1",
                SLURM_JOB_NODELIST_HET_GROUP_1="gpu[1-2]",
                SLURM_JOB_NODELIST_HET_GROUP_2="cpu1",
            ),
            0,
            "slurm",
            {"worker": ["gpu1:2000", "gpu2:2000", "cpu1:2000", "cpu1:2001"]},
            "worker:3",
        ),
        (
            slurm("a,b", "2,1", 2, 1, 0, SLURM_STEP_RESV_PORTS="12010-12011"),
            0,
            "slurm",
            {"worker": ["a:12010", "a:12011", "b:12010"]},
            "worker:2",
        ),
        (
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
            0,
            "sagemaker",
            {"worker": ["algo-1:2222", "algo-2:2222"]},
            "worker:1",
        ),
        (
            {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SLURM_STEP_ID": "0"},
            0,
            "skypilot",
            {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
            "worker:1",
        ),
        (
            {"TFDIST_PODS": "3", "TFDIST_SERVICE": "digits", "HOSTNAME": "digits-2", "JOB_COMPLETION_INDEX": "2"},
            1,
            "kubernetes",
            {"chief": ["digits-0.digits:2222"], "worker": ["digits-1.digits:2222"], "ps": ["digits-2.digits:2222"]},
            "ps:0",
        ),
        (  # Kubeflow's
            {"TF_CONFIG": '{"cluster": {"worker": ["w0:1", "w1:1"]}, "task": {"type": "worker", "index": 1}}'},
            0,
            "tf_config",
            {"worker": ["w0:1", "w1:1"]},
            "worker:1",
        ),
        ({**RECORDED_SLURM, **RECORDED_OPEN_MPI}, 0, "open_mpi", None, "worker:1"),
        (
            {
                **RECORDED_OPEN_MPI,
                "TF_CONFIG": '{"cluster": {"worker": ["w:1"]}, "task": {"type": "worker", "index": 0}}',
            },
            0,
            "tf_config",
            {"worker": ["w:1"]},
            "worker:0",
        ),
    ],
)
def test_an_environment_is_a_cluster(environ, ps, source, jobs, task):
    found = discovery.resolve({**environ, "PATH": "/bin"}, ps=ps)
    assert (found.source, str(found.task)) == (source, task)
    assert jobs is None or found.cluster == ClusterSpec(jobs)
    assert set(found.variables) <= set(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        RECORDED_BATCH,
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"TF_CONFIG": "{}"},
        {"TFDIST_PODS": "1", "TFDIST_SERVICE": "s", "HOSTNAME": "s-0"},
        slurm("n1", "1", 0, 0, 0),
    ],
)
def test_one_process_is_no_cluster(environ):
    assert discovery.resolve(environ) is None


def test_all_tasks_of_a_job_find_the_same_ports_and_another_job_others():
    ranks = [{**RECORDED_SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
    clusters = [discovery.resolve(environ).cluster for environ in ranks]
    assert clusters[0] == clusters[1] == clusters[2]
    other = discovery.resolve({**ranks[0], "SLURM_JOB_ID": "2"}).cluster
    assert not set(other.jobs["worker"]) & set(clusters[0].jobs["worker"])


@pytest.mark.parametrize(
    ("environ", "source", "said"),
    [
        (
            {**RECORDED_SLURM, "SLURM_PROCID": "x"},
            "auto",
            "slurm: SLURM_PROCID must be a whole number from 0. Received: 'x'.",
        ),
        ({"SLURM_STEP_ID": "0"}, "auto", "slurm: SLURM_PROCID must be set, because SLURM_STEP_ID is set."),
        ({**RECORDED_SLURM, "SLURM_STEP_NODELIST": "n[3-1]"}, "auto", "slurm: a node list must be such as"),
        ({**RECORDED_SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"}, "auto", "1 nodes, 2 tasks on 1 nodes, 3 tasks"),
        (
            slurm("a,b", "1,2", 1, 0, 0),
            "auto",
            "slurm: task 1 is task 0 of node 0, not where SLURM_DISTRIBUTION places it among",
        ),
        (
            slurm("a,b", "1,1", 0, 0, 0, SLURMD_NODENAME="b"),
            "auto",
            "slurm: task 0 is task 0 of node 0 (b), not where SLURM_DISTRIBUTION",
        ),
        ({"SKYPILOT_NODE_IPS": "a\nb"}, "auto", "skypilot: SKYPILOT_NODE_RANK must be set"),
        (
            {"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "2"},
            "auto",
            "skypilot: rank 2 is out of range; there are 2 ranks, 0 to 1.",
        ),
        ({"SM_HOSTS": "algo-1"}, "auto", 'sagemaker: SM_HOSTS must be a list such as ["algo-1", "algo-2"].'),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, "auto", "SM_CURRENT_HOST must be one of SM_HOSTS, a, b."),
        (
            {"TFDIST_PODS": "2", "TFDIST_SERVICE": "s", "HOSTNAME": "s-2"},
            "auto",
            "kubernetes: HOSTNAME must be NAME-INDEX",
        ),
        (
            {"TFDIST_PODS": "2", "TFDIST_SERVICE": "s", "HOSTNAME": "s-\u00b2"},
            "auto",
            "kubernetes: HOSTNAME must be NAME-INDEX",
        ),
        (
            {"TFDIST_PODS": "999999999", "TFDIST_SERVICE": "s", "HOSTNAME": "s-1"},
            "auto",
            "at most 10000. Received: 999999999.",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "9" * 5000, "OMPI_COMM_WORLD_RANK": "0"}, "auto", "OMPI_COMM_WORLD_SIZE must be"),
        ({"SM_HOSTS": "[" * 100_000, "SM_CURRENT_HOST": "a"}, "auto", "sagemaker: SM_HOSTS must be a list such as"),
        ({"TF_CONFIG": "{"}, "auto", "TF_CONFIG is not JSON"),
        ({}, "slurm", "the environment describes no cluster of slurm: SLURM_STEP_ID is not set."),
        (
            {**RECORDED_HETEROGENEOUS, "SLURM_JOB_NODELIST_PACK_GROUP_0": "node[0-1]"},
            "auto",
            "components that share a node are not supported; give each its own nodes. Received: node0, node1, node0.",
        ),
        ({}, "slrum", "unknown cluster source 'slrum'; did you mean 'slurm'?"),
        (
            {**RECORDED_OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "auto",
            "open_mpi: TFDIST_RENDEZVOUS must name a folder",
        ),
    ],
)
def test_a_fault_is_named(environ, source, said):
    with pytest.raises(ConfigError) as raised:
        discovery.resolve(environ, source)
    assert len(raised.value.faults) == 1 and said in raised.value.faults[0]


def test_a_list_and_a_source_are_one_too_many():
    with pytest.raises(ConfigError, match="cluster source slurm and a list of hosts are given; leave out one of them"):
        discovery.resolve({}, "slurm", hosts="h1,h2")


def test_too_few_ranks_for_the_servers():
    with pytest.raises(
        ConfigError, match="2 parameter servers need a chief and a worker besides: start 4 tasks or more"
    ):
        discovery.resolve(RECORDED_SLURM, ps=2)


@pytest.mark.parametrize(
    ("visible", "rank", "ps", "more", "expected"),
    [
        ("0,1,2,3", 1, 0, {}, "1"),
        ("0,1,2,3,4,5,6,7", 2, 0, {}, "4,5"),
        ("0,1,2,3,4", 3, 0, {}, "3"),
        ("-1,0", 1, 0, {}, None),
        ("", 0, 0, {}, None),
        ("0,1,2,3", 0, 0, {"SLURM_GPUS_PER_TASK": "2"}, None),
        # A chief, two workers, a server.
        ("0,1,2,3", 0, 1, {}, ""),
        ("0,1,2,3", 1, 1, {}, "0,1"),
        ("0,1,2,3", 2, 1, {}, "2,3"),
        ("0,1,2,3", 3, 1, {}, ""),
        ("0,1,2,3", 3, 0, {"SLURM_GPU_BIND": "none"}, "3"),
        ("0,1,2,3", 3, 0, {"SLURM_GPU_BIND": "closest"}, None),
    ],
)
def test_workers_of_one_host_share_its_gpus(visible, rank, ps, more, expected):
    environ = slurm("n1", "4", rank, 0, rank, CUDA_VISIBLE_DEVICES=visible, **more)
    found = discovery.resolve(environ, ps=ps)
    assert found.environ.get("CUDA_VISIBLE_DEVICES") == expected
    if expected is not None:
        assert not discovery.resolve({**environ, **found.environ}, ps=ps).environ, "a share is not shared again"


def test_a_chief_that_computes_has_its_gpu():
    cluster = ClusterSpec({"chief": ["10.0.0.1:1"], "worker": ["10.0.0.1:2"]})
    for task, expected in ((TaskSpec("chief", 0), "0"), (TaskSpec("worker", 0), "1")):
        environ = {"TF_CONFIG": cluster.to_tf_config(task), "CUDA_VISIBLE_DEVICES": "0,1"}
        assert discovery.resolve(environ).environ["CUDA_VISIBLE_DEVICES"] == expected


def test_unused_gpus_are_named_once(caplog):
    for rank, expected in ((0, "0,1"), (1, "2,3")):
        found = discovery.resolve(slurm("n1", "2", rank, 0, rank, CUDA_VISIBLE_DEVICES="0,1,2,3,4"))
        assert found.environ["CUDA_VISIBLE_DEVICES"] == expected
    sentence = "2 tasks share the 5 GPUs of the host 127.0.0.1: each uses 2, and 1 is unused. To use all, start a number of tasks that divides it."
    assert [record.getMessage() for record in caplog.records] == [sentence]


@pytest.mark.parametrize(("gpus", "ps"), [(1, 0), (3, 0), (1, 1)])
def test_fewer_gpus_than_tasks_is_an_error_on_each_task(gpus, ps):
    named = ",".join(map(str, range(gpus)))
    error = rf"{4 - 2 * ps} tasks .* share the host 127.0.0.1, .* Received: {gpus} \({named}\). Start at most {gpus} there, .* CUDA_VISIBLE_DEVICES= "
    for rank in range(4):
        environ = slurm("n1", "4", rank, 0, rank, CUDA_VISIBLE_DEVICES=named)
        with pytest.raises(ConfigError, match=error):
            discovery.resolve(environ, ps=ps)
        assert not discovery.resolve(environ | {"CUDA_VISIBLE_DEVICES": ""}, ps=ps).environ


@pytest.mark.parametrize("source", ["tf_config", "auto"])
def test_tasks_that_tf_config_places_on_one_host_share_its_gpus(source):
    cluster = ClusterSpec({"worker": ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"]})
    for index, expected in ((0, "0"), (1, "1"), (2, None)):
        environ = {"TF_CONFIG": cluster.to_tf_config(TaskSpec("worker", index)), "CUDA_VISIBLE_DEVICES": "0,1"}
        assert discovery.resolve(environ, source).environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_tasks_that_a_list_places_on_one_host_share_its_gpus():
    found = discovery.resolve({"CUDA_VISIBLE_DEVICES": "0,1"}, hosts="10.0.0.1:1,10.0.0.1:2", task="worker:1")
    assert found.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_servers_on_a_host_of_their_own_take_no_gpus():
    for rank, local in ((2, 0), (3, 1)):
        found = discovery.resolve(slurm("a,b", "2(x2)", rank, 1, local, CUDA_VISIBLE_DEVICES="0,1"), ps=2)
        assert (found.task.type, found.environ["CUDA_VISIBLE_DEVICES"]) == ("ps", "")


def test_tasks_of_several_hosts_share_their_own_hosts_gpus():
    for rank, node, local, expected in ((0, 0, 0, "0"), (1, 0, 1, "1"), (2, 1, 0, None)):
        environ = slurm("a,b", "2,1", rank, node, local, CUDA_VISIBLE_DEVICES="0,1")
        assert discovery.resolve(environ).environ.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[009-011,20],login1", ["n009", "n010", "n011", "n20", "login1"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("a-b.c,d", ["a-b.c", "d"]),
    ],
)
def test_node_lists(text, expected):
    assert slurm_lib.expand_hosts(text) == expected


@pytest.mark.parametrize(
    "text", ["", "n[", "n]", "n[3-1]", "a,,b", "n[a]", "n[]", "n[1-99999999999]", "n[1][", ",", f"n[{'1' * 5000}]"]
)
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(ConfigError, match="a node list must be such as"):
        slurm_lib.expand_hosts(text)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=5))
def test_ranges_keep_their_zeros_and_their_order(ranges):
    text = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges)
    expected = [f"n{number:0{width}d}" for first, more, width in ranges for number in range(first, first + more + 1)]
    assert slurm_lib.expand_hosts(f"n[{text}]") == expected


@settings(max_examples=25)
@given(st.text("n[]-,0123456789", max_size=12))
def test_any_text_is_a_list_of_nodes_or_a_config_error(text):
    try:
        found = slurm_lib.expand_hosts(text)
    except ConfigError:
        return
    assert found and all(found) and not any(sign in name for name in found for sign in "[],")


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from(["", "block", "cyclic", "plane=2", "block:cyclic"]),
)
def test_places_are_each_nodes_tasks_once(counts, distribution):
    found = slurm_lib.task_placement(counts, distribution)
    assert sorted(found) == [(node, local) for node, count in enumerate(counts) for local in range(count)]
    for node in range(len(counts)):
        assert [local for other, local in found if other == node] == list(range(counts[node]))


def test_tasks_per_node():
    assert slurm_lib.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2(x3", "x", "1,", "1(x999999999)", "1" * 5000):
        with pytest.raises(ConfigError, match="tasks per node must be a list such as"):
            slurm_lib.tasks_per_node(text)


@pytest.mark.parametrize(
    ("given", "jobs", "task"),
    [
        ({"hosts": "h1:2222,h2:2223", "task": "worker:1"}, {"worker": ["h1:2222", "h2:2223"]}, "worker:1"),
        ({"hosts": "h1, h1,h2", "task": "worker:1"}, {"worker": ["h1:2222", "h1:2223", "h2:2222"]}, "worker:1"),
        (
            {"hosts": "h1,h2", "ps_hosts": "h3", "task": "ps:0"},
            {"chief": ["h1:2222"], "worker": ["h2:2222"], "ps": ["h3:2222"]},
            "ps:0",
        ),
        (
            {"hosts": "h1,h2,h3", "ps": 1, "task": "chief:0"},
            {"chief": ["h1:2222"], "worker": ["h2:2222"], "ps": ["h3:2222"]},
            "chief:0",
        ),
        (
            {"hosts": f"{OWN}:1,no-such-host.invalid:1"},
            {"worker": [f"{OWN}:1", "no-such-host.invalid:1"]},
            "worker:0",
        ),
        (
            {"hosts": "[fd00::2]:5,fd00::1", "task": "worker:1"},
            {"worker": ["[fd00::2]:5", "[fd00::1]:2222"]},
            "worker:1",
        ),
    ],
)
def test_a_list_of_hosts_is_a_cluster(given, jobs, task):
    spec, own = hosts.cluster(**given)
    assert (spec, str(own)) == (ClusterSpec(jobs), task)


def test_a_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two\nh1 slots=2\n\nh2  # one\n")
    spec, task = hosts.cluster(hostfile=str(path), task="worker:2")
    assert (spec.jobs["worker"], task) == (("h1:2222", "h1:2223", "h2:2222"), TaskSpec("worker", 2))
    path.write_text("h1 slots=2 max_slots=4\nh2 max_slots=4\n")
    spec, task = hosts.cluster(hostfile=str(path), task="worker:2")
    assert spec.jobs["worker"] == ("h1:2222", "h1:2223", "h2:2222")
    path.write_text("h1 slot=2\nh2 a b\n")
    with pytest.raises(ConfigError) as raised:
        hosts.cluster(hostfile=str(path))
    assert [f"line {number}" in fault for number, fault in enumerate(raised.value.faults, 1)] == [True] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"hosts": "h1,h2"},
            "task must name this process's task, one of worker:0, worker:1: none of them is on this host.",
        ),
        ({"hosts": "localhost,127.0.0.1:7"}, ": worker:0, worker:1 are all on this host."),
    ],
)
def test_a_fault_of_a_list_is_named(given, said):
    with pytest.raises(ConfigError) as raised:
        hosts.cluster(**given)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("given", "addresses", "here"),
    [
        ({"hosts": f"{OWN},h2"}, f"{OWN}:2222 h2:2222", "worker:0"),
        ({"hosts": f"h1,{OWN.upper()}:3000"}, f"h1:2222 {OWN.upper()}:3000", "worker:1"),
        ({"hosts": "h1,h2", "task": "worker:1"}, "h1:2222 h2:2222", "worker:1"),
        ({"hosts": f"h1,{OWN}", "workers_per_host": 1}, f"h1:2222 {OWN}:2222", "worker:1"),
        (
            {"hosts": f"h1, {OWN}", "workers_per_host": 2},
            f"h1:2222 h1:2223 {OWN}:2222 {OWN}:2223",
            "worker:2 worker:3",
        ),
        (
            {"hosts": "h1:70,[fd00::1]:80", "workers_per_host": 2, "task": "worker:3,worker:2, worker:3"},
            "h1:70 h1:71 [fd00::1]:80 [fd00::1]:81",
            "worker:3 worker:2",
        ),
        ({"hosts": f"{OWN}:1,{OWN}:2"}, f"{OWN}:1 {OWN}:2", "worker:0 worker:1"),
        ({"hosts": "127.0.0.1"}, "127.0.0.1:2222", "worker:0"),
        (
            {"hosts": f"{OWN},h2", "ps_hosts": f"{OWN},h3", "workers_per_host": 2},
            f"{OWN}:2222 {OWN}:2223 h2:2222 h2:2223 {OWN}:2224 h3:2222",
            "chief:0 worker:0 ps:0",
        ),
        ({"hostfile": f"h1 slots=2 # two\n\n{OWN}\n"}, f"h1:2222 h1:2223 {OWN}:2222", "worker:2"),
        (
            {"hostfile": f"h1\n{OWN}\n", "workers_per_host": 2},
            f"h1:2222 h1:2223 {OWN}:2222 {OWN}:2223",
            "worker:2 worker:3",
        ),
        ({"hostfile": f"{OWN} slots=2\n", "ps_hosts": "h3"}, f"{OWN}:2222 {OWN}:2223 h3:2222", "chief:0 worker:0"),
    ],
)
def test_a_host_has_its_tasks_of_a_list(given, addresses, here, tmp_path):
    if "hostfile" in given:
        (tmp_path / "hosts").write_text(given["hostfile"])
        given = {**given, "hostfile": str(tmp_path / "hosts")}
    spec, tasks = hosts.local_tasks(**given)
    assert (" ".join(map(spec.address, spec.tasks())), " ".join(map(str, tasks))) == (addresses, here)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"hosts": "h1,h2"},
            "is not one of h1, h2: write the names or addresses by which the hosts reach each other, or name",
        ),
        ({"hosts": "localhost,127.0.0.1:7"}, "localhost, 127.0.0.1 are all addresses of this host ("),
        ({"hosts": "h1,h2", "task": "worker:2"}, "task must be one of worker:0, worker:1. Received: 'worker:2'."),
        (
            {"hosts": "h1,h2", "task": "worker:0 worker:1"},
            "task must be one of worker:0, worker:1. Received: 'worker:0 w",
        ),
        ({"hosts": "h1,h2", "task": ","}, "task must be one of worker:0, worker:1. Received: ','."),
        (
            {"hosts": "h1,H1"},
            "hosts has 'h1' more than once; write each host once, and set workers_per_host=2 for two tasks per host.",
        ),
        ({"hosts": "h1:1,h1:1"}, "hosts has 'h1:1' more than once"),
        ({"hosts": "h1,h1:2222"}, "address 'h1:2222' is already that of worker:0"),
        (
            {"hosts": "h1", "ps_hosts": "h3,h3"},
            "ps_hosts has 'h3' more than once; give each server on a host its own port",
        ),
        ({"hosts": "h1:1,h1:2", "workers_per_host": 2}, "worker:2: address 'h1:2' is already that of worker:1"),
        ({"hosts": "h1:65535", "workers_per_host": 2}, "port 65536 of 'h1:65536' is out of range"),
        ({"hosts": f"h1:{'9' * 5000}", "workers_per_host": 2}, "is out of range"),
        ({"hosts": "h1:x", "workers_per_host": 2}, "is not 'host:port'"),
        ({"hosts": "127.0.0.1,h2"}, "address '127.0.0.1:2222' is each host's own, but worker:1 is at 'h2:2222'"),
        ({"hosts": "h1", "ps_hosts": "h3"}, "1 parameter servers need a chief and a worker besides"),
        ({"hosts": " , "}, "hosts has no host; write it as host1,host2. Received: ' , '."),
        ({}, "either hosts or hostfile must be given. Received: hosts='', hostfile=''."),
        ({"hosts": "h1", "hostfile": "x"}, "either hosts or hostfile must be given"),
        ({"hosts": "h1,h2", "workers_per_host": 10**9}, "a cluster has at most 10000 tasks. Received: 2000000000."),
        ({"hostfile": "no/such"}, "hostfile no/such: No such file or directory."),
        ({"hostfile": "# none\n"}, " has no host."),
        ({"hostfile": "h1 slots=2\n", "workers_per_host": 2}, "remove its slots, or leave out workers_per_host."),
    ],
)
def test_a_fault_of_the_tasks_of_a_host_is_named(given, said, tmp_path):
    if " " in given.get("hostfile", ""):
        (tmp_path / "hosts").write_text(given["hostfile"])
        given = {**given, "hostfile": str(tmp_path / "hosts")}
    with pytest.raises(ConfigError) as raised:
        hosts.local_tasks(**given)
    assert said in str(raised.value)


def test_json_of_a_cluster_is_what_tf_config_has():
    found = discovery.resolve(slurm("n[1-2]", "1(x2)", 1, 1, 0))
    assert json.loads(found.cluster.to_tf_config(found.task)) == {
        "cluster": {"worker": ["n1:2000", "n2:2000"]},
        "task": {"type": "worker", "index": 1},
    }


def test_a_job_without_srun_is_told():
    assert "this Slurm job has 2 tasks" in discovery.misconfiguration_hint(RECORDED_BATCH)
    interactive = {**RECORDED_BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}  # written by hand
    assert "this Slurm job has 2 tasks" in discovery.misconfiguration_hint(interactive)
    assert discovery.misconfiguration_hint({}) == discovery.misconfiguration_hint(RECORDED_SLURM) == ""


def test_ranks_meet_in_a_folder(tmp_path):
    """Open MPI on two hosts, whose environments say nothing of each other; written by hand."""

    def resolve(rank, start, seconds=60):
        environ = {**RECORDED_OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        environ |= {
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_MCA_orte_precondition_transports": f"ff9ea83c6bba4ba6-2224577f1c77150{start}",
            "TFDIST_RENDEZVOUS": str(tmp_path),
            "TFDIST_PORT": str(2000 + 100 * start + rank),
        }
        return discovery.resolve(environ, timeout=seconds)

    for start in range(2):  # of one job id: what the first has left there is not taken for the second's
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = list(pool.map(resolve, range(2), [start] * 2))
        assert [str(each.task) for each in found] == ["worker:0", "worker:1"]
        with pytest.raises(ClusterError, match="addresses of rank 1 in"):
            resolve(0, start + 1, seconds=0.2)
        addresses = [f"{OWN}:{2000 + 100 * start + rank}" for rank in range(2)]
        assert found[0].cluster == found[1].cluster == ClusterSpec({"worker": addresses})


def test_a_rank_that_does_not_come_is_named(tmp_path):
    with pytest.raises(
        ClusterError, match=r"Waited 0 s for the addresses of rank 0, 2 in .*/tfdist-job-3\. Are they started"
    ):
        rendezvous.exchange(str(tmp_path), "job", 1, 3, "h:1", timeout=0.3)
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"rank 1 cannot write its address to .*Not a directory"):
        rendezvous.exchange(str(tmp_path / "file"), "job", 1, 3, "h:1", timeout=0.3)


def test_more_slots_than_any_cluster_has_are_refused(tmp_path):
    (tmp_path / "hostfile").write_text("h1 slots=999999\n")
    with pytest.raises(ConfigError, match=r"hostfile .*hostfile, line 1: more than 10000 tasks"):
        discovery.resolve({}, hostfile=str(tmp_path / "hostfile"))
