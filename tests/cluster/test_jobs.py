"""Jobs for schedulers: manifests that hold, in which every pod finds the same cluster."""

from __future__ import annotations

import pathlib

import pytest
import yaml

from tfdist.cluster.jobs import job as job_lib
from tfdist.cluster.jobs import kubernetes, slurm
from tfdist.cluster.resolvers import discovery
from tfdist.config import ClusterConfig, StrategyConfig, TrainConfig
from tfdist.errors import ConfigError

RELEASES = ("1.34", "1.37")
WORKDIR = pathlib.PurePosixPath("/shared/run")


def config(workers, ps=0, **more):
    strategy = StrategyConfig("parameter_server" if ps else "multi_worker_mirrored")
    return TrainConfig(strategy=strategy, cluster=ClusterConfig(workers, ps), **more)


def manifests(job=job_lib.Job(), write=kubernetes.manifests, **cluster):  # noqa: B008 (frozen)
    arguments = ["--config=configs/digits.py", f"--workdir={WORKDIR}", "--config.epochs=3"]
    return list(yaml.safe_load_all(write(config(**cluster), WORKDIR, arguments, job)))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "job", [job_lib.Job(), job_lib.Job("digits-7", 4, "16G", 2, "registry.example/image:1", "claim")]
)
def test_manifests_are_as_the_release_has_them(release, job):
    import kubernetes_validate

    for manifest in manifests(job, workers=2, ps=1):
        kubernetes_validate.validate(manifest, release, strict=True)


@pytest.mark.parametrize(("cluster", "expected"), [({"workers": 3}, 3), ({"workers": 2, "ps": 1}, 4)])
def test_every_pod_finds_the_same_cluster(cluster, expected):
    service, job = manifests(job_lib.Job("digits"), **cluster)
    template = job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == expected
    assert service["spec"]["publishNotReadyAddresses"], "or pods that look for each other never get ready"
    assert template["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    found = []
    for index in range(expected):  # as Kubernetes sets an Indexed Job's
        environ = {each["name"]: each["value"] for each in container["env"]}
        environ |= {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{job['metadata']['name']}-{index}"}
        found.append(discovery.resolve(environ, ps=cluster.get("ps", 0)))
    assert len({each.task for each in found}) == expected
    assert {tuple(each.cluster.jobs.items()) for each in found} == {tuple(found[0].cluster.jobs.items())}
    assert {each.cluster.address(each.task) for each in found} == {
        f"digits-{index}.digits:{service['spec']['ports'][0]['port']}" for index in range(expected)
    }


def test_every_pod_of_a_train_job_finds_the_same_cluster():
    runtime, training = manifests(job_lib.Job("digits"), kubernetes.train_job, workers=3)
    assert training["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}, "no environment of another framework"
    (pods,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = pods["template"]["spec"]["template"]["spec"]["containers"]
    found = []
    for index in range(3):
        environ = {each["name"]: each["value"] for each in container["env"]}
        # As a JobSet names its pods: JOBSET-JOB-REPLICA-INDEX.
        host = f"{training['metadata']['name']}-{pods['name']}-0-{index}"
        found.append(discovery.resolve({**environ, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host}))
    assert [each.task.index for each in found] == [0, 1, 2]
    addresses = [f"digits-node-0-{index}.digits:2222" for index in range(3)]
    assert all(list(each.cluster.jobs["worker"]) == addresses for each in found)


def test_a_train_job_is_as_the_release_has_it():
    import kubernetes_validate

    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = job_lib.Job("digits-7", 4, "16G", 2, "registry.example/image:1", "claim")
    runtime, training = manifests(job, kubernetes.train_job, workers=2, ps=1)
    (pods,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods["template"]["spec"]["template"]["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"  # the default
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime, "a field is unknown"
    assert models.TrainerV1alpha1TrainJob.from_dict(training).to_dict() == training, "a field is unknown"
    (of_kubernetes,) = (each for each in manifests(job, workers=2, ps=1) if each["kind"] == "Job")
    kubernetes_validate.validate({**of_kubernetes, "spec": pods["template"]["spec"]}, RELEASES[-1], strict=True)


def test_a_pod_that_has_saved_is_started_again_and_a_faulty_configuration_is_not():
    _, job = manifests(workers=2)
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"][:2]
    }
    assert rules == {(2,): "FailJob", (75,): "Ignore"}


def test_the_script_has_what_slurm_needs():
    arguments = ["--config=configs/my digits.py", "--workdir=run"]
    script = slurm.script(
        config(2, 1), pathlib.PurePath("run"), arguments, job_lib.Job("x", 2, "4G", 1, time="1:00:00")
    )
    for line in ("--ntasks=4", "--cpus-per-task=2", "--mem-per-cpu=2048M", "--gpus-per-task=1", "--signal=TERM@120"):
        assert f"#SBATCH {line}\n" in script
    assert "python -m tfdist.train '--config=configs/my digits.py' --workdir=run\n" in script


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (job_lib.Job("A_B"), "name must be lower-case letters"),
        (job_lib.Job(memory="4"), "memory must be a number with K, M, G or T, such as 4G. Received: '4'."),
        (job_lib.Job(cpus=0), "cpus must be 1 to 10000"),
        (job_lib.Job(time="soon"), "time must be such as 2:00:00"),
        (job_lib.Job(image=""), "image must be such as"),
        (job_lib.Job(claim="My Claim"), "claim must be lower-case"),
    ],
)
def test_a_fault_is_named(job, said):
    for write in (slurm.script, kubernetes.manifests, kubernetes.train_job):
        with pytest.raises(ConfigError, match=said):
            write(config(2), WORKDIR, [], job)


def test_a_volume_wants_an_absolute_path():
    with pytest.raises(ConfigError, match="workdir must be an absolute path"):
        kubernetes.manifests(config(2), pathlib.PurePath("run"), [], job_lib.Job())


def test_kubernetes_puts_no_variable_into_a_flag():
    workdir = pathlib.PurePath("/data/$(TFDIST_PODS)")
    written = yaml.safe_load_all(kubernetes.manifests(config(2), workdir, [f"--workdir={workdir}"], job_lib.Job()))
    (container,) = next(m for m in written if m["kind"] == "Job")["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "--workdir=/data/$$(TFDIST_PODS)"  # by which Kubernetes means one $
    assert container["volumeMounts"][0]["mountPath"] == str(workdir)


def test_a_job_has_no_cluster_of_its_own():
    for write in (slurm.script, kubernetes.manifests):
        with pytest.raises(ConfigError, match=r"cluster\.hosts is not for a job, whose tasks the scheduler places"):
            write(TrainConfig(cluster=ClusterConfig(2, hosts="h1,h2")), WORKDIR, [], job_lib.Job())


def test_the_notice_is_long_enough_to_save():
    with pytest.raises(ConfigError, match="notice must be grace_seconds, 300 s, or more"):
        slurm.script(config(2, grace_seconds=300.0), WORKDIR, [], job_lib.Job())


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as raised:
        kubernetes.manifests(
            TrainConfig(cluster=ClusterConfig(2, hosts="h")), pathlib.PurePath("run"), [], job_lib.Job("A", cpus=0)
        )
    assert len(raised.value.faults) == 4
