"""Compressors between real processes: as in a simulation, the same weights everywhere, files and bytes as promised."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.compression import test_compressors
from tests.helpers import fork_server
from tests.multiprocess import harness

pytestmark = pytest.mark.timeout(900)

MULTI_WORKER, THREE = ("multi_worker_mirrored", 2), ("multi_worker_mirrored", 3)
# A network of its own, where nothing else is sent.
ISOLATED = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.fixture(scope="module")
def isolated():
    return subprocess.run([*ISOLATED, "true"], capture_output=True).returncode == 0


def run(how, out, isolated, *parts):
    """Runs parts of the program; returns each rank's results, and the folder."""
    strategy, size = how
    if strategy == "mirrored":
        return harness.run("compression_program", strategy, out, *parts), out
    command = fork_server.command("tests.multiprocess.compression_program", strategy, str(out), *parts)
    launch = [sys.executable, "-m", "tfdist.launch", f"--workers={size}", f"--log_dir={out / 'logs'}", "--", *command]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), harness.TRANSPORT: "grpc"}
    done = subprocess.run(
        [*(ISOLATED if isolated else []), *launch], env=environ, capture_output=True, text=True, timeout=harness.TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [harness.load(out, rank) for rank in range(size)], out


STRATEGIES = {
    "params": [
        pytest.param(("mirrored", 2), marks=pytest.mark.slow),
        MULTI_WORKER,
        pytest.param(THREE, marks=pytest.mark.slow),
    ],
    "ids": lambda how: f"{how[0]}-{how[1]}",
}


@pytest.fixture(scope="module", **STRATEGIES)
def ranks(request, tmp_path_factory, isolated):
    """What a step does: each rank's results, and the folder."""
    parts = ("quick_exchanges", "rows", "refused", "kinds", "waiting", "waiting_optimizer")
    return run(request.param, tmp_path_factory.mktemp(request.param[0]), isolated, *parts)


@pytest.fixture(scope="module", **STRATEGIES)
def further_ranks(request, tmp_path_factory, isolated):
    """The same of more compressors."""
    return run(request.param, tmp_path_factory.mktemp(request.param[0]), isolated, "further_exchanges")


@pytest.fixture(scope="module", **STRATEGIES)
def trained(request, tmp_path_factory, isolated):
    """What comes of many steps; the same."""
    return run(request.param, tmp_path_factory.mktemp(request.param[0]), isolated, "trained", "options", "inf", "bytes")


def replicas(found):
    """Returns what each replica has, over all processes."""
    return [each for rank in found for each in rank]


DIGITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
DIGITS |= {
    name: 2.0**-20 for name in test_compressors.ALL if "powersgd" in name
}  # orthogonal columns magnify the last digit


@pytest.mark.parametrize("name", [name for name in test_compressors.ALL if name not in test_compressors.SIMILAR])
def test_processes_do_what_the_simulation_does(ranks, name):
    check_exchanges([results["quick_exchanges"][name] for results in ranks[0]], name)


@pytest.mark.full
@pytest.mark.parametrize("name", test_compressors.SIMILAR)
def test_so_they_do_with_more_compressors(further_ranks, name):
    check_exchanges([results["further_exchanges"][name] for results in further_ranks[0]], name)


def check_exchanges(ranks, name):
    """Compares ranks with a simulation: to the bit where whole numbers are sent. A sum of more than two others depends on the
    order of the ranks, which TensorFlow chooses: by the last of their digits."""
    size = sum(len(steps[0]) for steps in ranks)
    run = test_compressors.Run(test_compressors.ALL[name], size)
    steps = zip(*ranks, strict=True)
    for step, (kind, found) in enumerate(zip(("normal", "heavy_tails", "ties", "normal"), steps, strict=True)):
        rng = np.random.default_rng(step)
        values = [
            [test_compressors.INPUTS[kind](rng, shape).astype(np.float32) for shape in test_compressors.SHAPES]
            for _ in range(size)
        ]
        expected = run.step(values)
        for mine, other in zip(replicas(found), expected, strict=True):
            both = zip(tf.nest.flatten(mine), tf.nest.flatten((other.sums, other.states)), strict=True)
            for number, (a, b) in enumerate(both):
                compressed = number in test_compressors.BIG or number >= len(test_compressors.SHAPES)
                last = size * DIGITS[name] if compressed and size > 2 and name in DIGITS else 1e-6
                np.testing.assert_allclose(a, b, rtol=0, atol=last * max(1, np.abs(b).max()), err_msg=str(number))
                if ("int8" in name or "topk" in name) and (compressed or size == 2):
                    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "topk_feedback"])
def test_gradients_of_any_type_and_shape_are_summed_in_buckets(ranks, name):
    size = sum(len(results["quick_exchanges"]["none"][0]) for results in ranks[0])
    for results in ranks[0]:
        shapes = [(50, 40), (), (30, 40), (7,), (50, 40)]
        for number, (parts, shape) in enumerate(zip(results["kinds"][name], shapes, strict=True)):
            for part in parts:
                assert part.shape == shape
                if name == "topk_feedback" and number in (0, 4):  # of equal numbers, each rank sends the same ones
                    part = part[part != 0]
                    assert 0 < part.size < 2000
                np.testing.assert_allclose(part.astype(float), size * (size + 1) / 2, rtol=0.01)


def test_variables_that_tensorflow_cannot_broadcast_are_refused(ranks):
    """Of one without numbers it would die by SIGSEGV."""
    said = {
        "empty": "cannot broadcast a variable of size 0 (odd)",
        "16": "cannot broadcast a variable of bfloat16 (odd)",
    }
    for results in ranks[0]:
        for name, found in results["refused"].items():
            assert said[name] in found if ranks[0][0]["between_tasks"] else not found


def test_buckets_do_not_wait_for_each_other(ranks):
    for results in ranks[0]:
        # So many that each would keep a thread wait for the first ones.
        expected = {(4, 0): (1, 0), (4, 800): (2, 0), (4, 400): (4, 0), (18, 400): (18, 2)}
        assert results["waiting"] == (expected if ranks[0][0]["between_tasks"] else dict.fromkeys(expected, (0, 0)))
        if ranks[0][0]["between_tasks"]:
            # Four buckets and, with a compressor, which cuts them, eight, and the note; int8's sum comes after its scales.
            expected = {"none": (4, 0), "bf16": (9, 0), "int8_sum": (17, 8)}
            assert results["waiting_optimizer"] == expected


@pytest.mark.full
def test_after_many_steps_all_ranks_have_the_same_weights(trained):
    for name, first in trained[0][0]["trained"].items():
        assert len(first["weights"]) == 6
        for results in trained[0]:
            for components, expected in zip(results["trained"][name]["weights"], first["weights"], strict=True):
                for component in components:
                    np.testing.assert_array_equal(component, expected[0], err_msg=name)


@pytest.mark.full
def test_it_learns_as_well(trained):
    accuracy = {name: results["accuracy"] for name, results in trained[0][0]["trained"].items()}
    assert accuracy["none"] > 0.9 and min(accuracy.values()) > accuracy["none"] - 0.02, accuracy


def test_rows_of_embeddings_are_the_same_everywhere(ranks):
    found = {name: weights for name, (weights, _) in ranks[0][0]["rows"].items()}
    for name, variables in found.items():
        for number, components in enumerate(variables):
            for results in ranks[0]:
                for component in results["rows"][name][0][number]:
                    np.testing.assert_array_equal(component, components[0], err_msg=name)
            np.testing.assert_allclose(components[0], found["none"][number][0], atol=1e-3)
    assert not np.array_equal(found["int8"][0][0], found["none"][0][0])


@pytest.mark.full
@pytest.mark.parametrize("how", ["sgd", "loss_scale"])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(trained, how):
    for results in trained[0]:
        before, after = results["inf"][how][2], results["inf"][how][3]
        assert before["iterations"] == after["iterations"] == 2
        assert before["states"] and np.abs(before["states"][0][0]).max() > 0
        for kind in ("weights", "states"):
            for mine, other in zip(after[kind], before[kind], strict=True):
                np.testing.assert_array_equal(mine, other)


@pytest.mark.full
@pytest.mark.parametrize("name", ["accumulation", "ema_decay_clip", "loss_scale"])
def test_saved_models_load_without_tfdist_optimizer_included(trained, name):
    program = f"""
import sys, keras
sys.modules["tfdist"] = None
model = keras.models.load_model({str(trained[1] / f"{name}.keras")!r})
optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
print(type(model.optimizer).__module__, int(optimizer.iterations), len(optimizer.variables))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    module, iterations, count = done.stdout.split()
    assert module.startswith("keras.") and int(iterations) == (10 if name == "accumulation" else 40) and int(count) > 10


@pytest.mark.full
def test_the_network_carries_what_was_planned(trained, isolated):
    found = trained[0][0]["bytes"]
    if not found:
        return  # in one process nothing is sent
    if not isolated:
        pytest.skip("no right to make a network")
    for name, (planned, measured, total) in found.items():
        assert abs(measured / planned - 1) < 0.05, (name, planned, measured)
        assert total > 10**7
    assert found["none"][0] > 4 * 10**7


def test_the_report_measures_both(ranks):
    for results in ranks[0]:
        _, report = results["rows"]["int8"]
        assert report["exchange_ms"].keys() == {"compressed", "plain"}
        assert min(report["exchange_ms"].values()) > 0
