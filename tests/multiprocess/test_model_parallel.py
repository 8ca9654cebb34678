"""Variables that live as pieces by a `LayoutMap` train as those of stock Keras in one process."""

import re

import numpy as np
import pytest

from tests.helpers import tiers
from tests.multiprocess import harness
from tfdist.collectives import hardware

WORKERS = "multi_worker_mirrored"
FIRST = ("dense-adamw", "embedding")
OTHERS = (
    *(
        "conv",
        "dense-global_clipnorm",
        "rows",
        "dense-rmsprop",
        "tied",
        "shared",
        "nested",
        "gru",
        "lstm",
        "condition",
        "branches",
        "conv1d",
        "batch_norm",
        "dropout",
        "einsum",
        "attention",
        "norms",
        "regularized",
        "bfloat16",
        "moments_alone",
    ),
    *("dense-clipnorm", "dense-averages", "dense-accumulation", "dense-accumulation_clipped", "dense-constraint"),
    "dense-accumulation_constraint",
    "dense-constraint_across",
    "dense-clipped_later",
)
TOGETHER = 9  # cases of one program, which has a limit of its time
# The exchanges of a step within a model group: the sums of Megatron-LM's conjugate functions, and gathers of parts of activations.
LAST = [
    "parts",
    "parts",
    "sum",
]  # a layer by columns, without a partner: its outputs, the gradients of its whole bias and of its inputs
SPLIT = {
    "pair": ["sum", *LAST],
    "transformer": None,
    "logits": None,
    "deferred": ["sum"],
    "pair_dropout": ["sum", *LAST],
    "row": ["sum", *LAST],
    "gated": ["sum", *LAST, "parts"],
    "seen_outside": ["parts", "sum", *LAST, "parts"],
    "extracted": ["sum", "parts", *LAST],
    "block": ["parts", "sum", *LAST, "parts"],
    "einsums": ["sum", *LAST, "sum"],
    "large_table": ["sum", *LAST],
    "transformer_tied": None,
    "transformer_dropout": None,
    "transformer_grouped": None,
    "scores": None,
    "logits_ignored": None,
    "logits_smoothed": ["parts"],  # of two numbers for each label
    "probabilities": ["parts"],  # of the outputs
}
QUICK_SPLIT = 3  # of them in the first tier
SPLIT_GROUPS = tuple(SPLIT)[:QUICK_SPLIT], tuple(SPLIT)[QUICK_SPLIT:]
ERRORS = {
    "two": "The layout map has two layouts for one variable",
    "rank": "has 2 dimensions, and the variable has shape",
    "batch": "names 'batch', the axis of the batch",
    "parts": "splits a dimension of size 3 into 2 parts along 'model'",
    "saved_alone": "call trainer.save, model.save or model.save_weights on all workers",
    "function": "within a tf.function, where workers cannot wait for each other",
    "axis": "Invalid axis names",
    "mirrored": "needs the strategy multi_worker_mirrored",
    "servers": "needs the strategy multi_worker_mirrored",
    "sharded": "not possible with strategy.shard_optimizer",
    "local": "not possible with strategy.sync_every",
    "shares": "not possible with strategy.batch_shares=by_speed",
    "scaled": "not possible with mixed_float16 (a LossScaleOptimizer)",
    "lamb": "Lamb, which is not known to update each element independently",
    "compressed": "keras.distribution.ModelParallel is not possible with compression",
    "mesh": "has 3 devices, and there must be one for each worker",
}
TRAININGS = [
    *((mesh, case) for mesh in ("1x2",) for case in FIRST),
    *(("2x2", case) for case in FIRST),
    *(("2x1", case) for case in FIRST),
    *(("1x2", case) for case in OTHERS),
    # Two replicas draw other masks than one, add the rounded gradients of bfloat16 in another order, and have other moments.
    *(("2x2", case) for case in OTHERS if case not in ("dropout", "bfloat16", "moments_alone")),
]


def run(runs, mesh, case, strategy=WORKERS, alone=False):
    """Returns what a case has come to on each rank, and the output folder."""
    listed = next((cases for cases in (FIRST, *SPLIT_GROUPS) if case in cases), OTHERS)
    begin = listed.index(case) // TOGETHER * TOGETHER if case in listed else 0
    cases = listed[begin : begin + TOGETHER]
    if alone:
        cases = (case,)
    size = int(np.prod([int(side) for side in mesh.split("x")]))
    ranks, out = runs(strategy, "model_parallel_program", mesh, *cases, size=size)
    return [rank[case] for rank in ranks], out


@pytest.mark.parametrize(("mesh", "case"), tiers.cases(TRAININGS, len(FIRST)))
def test_pieces_train_as_one_process(runs, mesh, case):
    (stock,), _ = run(runs, "1x1", case, "stock")
    ranks, _ = run(runs, mesh, case)
    limit = 2**-8 if case == "bfloat16" else 1e-6  # workers round the parts of a sum in bfloat16, which has 8 bits
    for rank in ranks:
        for kind in ("losses", "weights", "evaluated"):
            assert harness.difference(rank[kind], stock[kind]) < limit, kind
        weights, slots = rank["saved"]
        assert harness.difference(weights, rank["weights"]) == 0
        assert harness.difference(slots, stock["saved"][1]) < limit
        assert harness.difference(*rank["predicted"]) < limit


@pytest.mark.full
def test_pieces_on_gpus_train_as_one_process(runs, monkeypatch):
    monkeypatch.setenv(hardware.STAND_IN, "1")
    test_pieces_train_as_one_process(runs, "2x2", FIRST[0])
    _, out = run(runs, "2x2", FIRST[0])
    assert next((out / "logs").glob("*worker-0*")).read_text().count("on CPUs that stand in for them alone") == 1


PARTS = [(mesh, case) for mesh in ("1x2", "2x2") for case in SPLIT if mesh == "1x2" or "dropout" not in case]


@pytest.mark.parametrize(("mesh", "case"), tiers.cases(PARTS, QUICK_SPLIT))
def test_workers_compute_parts_of_layers(runs, mesh, case):
    (stock,), _ = run(runs, "1x1", case, "stock")
    ranks, _ = run(runs, mesh, case)
    for rank in ranks:
        for kind in ("losses", "weights", "evaluated"):
            assert harness.difference(rank[kind], stock[kind]) < 1e-5, kind
        assert SPLIT[case] in (None, rank["exchanges"])


@pytest.mark.parametrize(
    ("case", "gathers"),
    tiers.cases([("logits", 0), ("logits_smoothed", 0), ("logits_ignored", 1), ("probabilities", 1)], 1),
)
def test_logits_are_gathered_for_other_losses_and_metrics_alone(runs, case, gathers):
    ranks, _ = run(runs, "1x2", case)
    part = 64 // 2
    for rank in ranks:
        exchanges = list(zip(rank["exchanges"], rank["widths"], strict=True))
        assert exchanges.count(("parts", part)) == gathers


@pytest.mark.parametrize("case", tiers.cases([case for case in SPLIT if case.startswith("transformer")], 1))
def test_a_block_adds_activations_twice_in_each_direction(runs, case):
    ranks, _ = run(runs, "1x2", case)
    lookups = 0 if case == "transformer_tied" else 1
    last = 1  # of the gradients of the inputs of the last layer
    for rank in ranks:
        assert rank["exchanges"].count("sum") == 2 * (2 + 2) + lookups + last


def test_variables_at_rest_need_a_share_of_the_memory(runs):
    (whole,), _ = run(runs, "1x1", "live=large-adamw", "stock", alone=True)
    ranks, _ = run(runs, "1x2", "live=large-adamw", alone=True)
    assert max(ranks) < whole / 2 * 1.05


@pytest.mark.parametrize(("mesh", "saved_by"), tiers.cases([("2x1", "1x2"), ("1x2", "2x2"), ("2x2", "2x1")], 1))
def test_saved_weights_continue_in_another_mesh(runs, mesh, saved_by):
    _, out = run(runs, saved_by, "dense-adamw")
    case = f"continued={out / 'dense-adamw.keras'}"
    (stock,), _ = run(runs, "1x1", case, "stock", alone=True)
    ranks, _ = run(runs, mesh, case, alone=True)
    for rank in ranks:
        assert harness.difference(rank["loaded"], stock["loaded"]) == 0
        assert harness.difference(rank["other"], stock["other"]) == 0
        for kind in ("weights", "slots"):
            assert harness.difference(rank[kind], stock[kind]) < 1e-6
        assert (rank["elements"] < stock["elements"]) == (mesh != "2x1")


LOADED = [
    ("1x2", "dense-adamw"),
    *((mesh, case) for mesh in ("1x2", "2x2") for case in ("dense-global_clipnorm", "dense-averages", "transformer")),
    *((mesh, "dense-accumulation") for mesh in ("2x1", "2x2")),
]


@pytest.mark.parametrize(("mesh", "case"), tiers.cases(LOADED, 1))
def test_a_loaded_model_continues_with_its_optimizer(runs, mesh, case):
    _, out = run(runs, "1x2", case)
    path = out / f"{case}.keras"
    (stock,), _ = run(runs, "1x1", f"loaded={path}", "stock", alone=True)
    ranks, _ = run(runs, mesh, f"loaded={path}", alone=True)
    for rank in ranks:
        assert harness.difference(rank["loaded"], stock["loaded"]) == 0
        for kind in ("weights", "slots"):
            assert harness.difference(rank[kind], stock[kind]) < (1e-5 if case in SPLIT else 1e-6)
        assert (rank["elements"] < stock["elements"]) == (mesh != "2x1")


@pytest.mark.parametrize("case", tiers.cases(["dense", "embedding", "nested", "attention", "tied"], 1))
def test_an_exported_model_has_whole_variables(runs, case):
    ranks, _ = run(runs, "1x2", f"exported={case}", alone=True)
    for rank in ranks:
        assert harness.difference(*rank) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1x2", "2x2"])
def test_workers_skip_an_update_if_a_gradient_of_any_piece_is_not_finite(runs, mesh):
    (stock,), _ = run(runs, "1x1", "columns-nan", "stock", alone=True)
    ranks, _ = run(runs, mesh, "columns-nan", alone=True)
    for rank in ranks:
        assert harness.difference(rank["weights"], stock["weights"]) < 1e-6


def test_each_worker_holds_pieces_and_says_so(runs):
    ranks, out = run(runs, "1x2", "dense-adamw")
    kernels = 8 * 12 // 2 + 12 * 4 // 2
    biases = 12 + 4
    assert [sum(rank["elements"]) for rank in ranks] == [
        3 * (kernels + biases) + 2
    ] * 2  # the optimizer has two scalars
    log = next((out / "logs").glob("*worker-0*")).read_text()
    assert re.search(
        r"weights and optimizer state: [\d.]+ MB on each of 2 workers instead of [\d.]+ \(1 x 2 mesh\)", log
    )
    assert log.count("'no_layer/kernel' match no variable so far") == 1
    assert "out.+" not in log


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "transport"), [("1x2", "tcp"), ("2x2", "shared_memory"), ("2x2", "tcp"), ("2x2", "grpc")]
)
def test_gathers_have_one_order_on_all_workers(runs, mesh, transport):
    case = "branches-late"  # pieces become ready in another order on each worker
    ((stock,), _) = runs("stock", "model_parallel_program", "1x1", case)
    ranks, _ = runs(WORKERS, "model_parallel_program", mesh, case, size=4 if mesh == "2x2" else 2, transport=transport)
    for rank in ranks:
        assert harness.difference(rank[case]["weights"], stock[case]["weights"]) < 1e-5


@pytest.mark.parametrize("case", ["read_alone", pytest.param("evaluated_alone", marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("tcp", marks=pytest.mark.full)])
def test_a_worker_that_gathers_pieces_alone_is_told_so(runs, case, transport):
    chief, other = runs(WORKERS, "model_parallel_program", "1x2", case, size=2, transport=transport)[0]
    place = r"tests/multiprocess/model_parallel_program\.py:\d+"
    sentence = rf"worker:1 has finished its program \(exit code 0\), and worker:0 waits for it at {place}: make the call of that line on"
    assert re.match(sentence, chief[case]), chief[case]
    assert not other[case]


def test_what_does_not_work_says_so(runs):
    ranks, _ = runs(WORKERS, "model_parallel_program", "1x2", *ERRORS, size=2)
    for rank in ranks:
        for case, sentence in ERRORS.items():
            assert sentence in rank[case], case


def test_all_workers_write_files_of_pieces_together_which_plain_keras_loads(runs):
    ranks, _ = runs(WORKERS, "model_parallel_program", "1x2", "written=dense-adamw", size=2)
    for rank in ranks:
        found = rank["written=dense-adamw"]
        last = found.pop("trainer.keras")
        assert len(found) == 4
        for file, values in found.items():
            for value, right in zip(values, last, strict=True):
                np.testing.assert_array_equal(value, right, err_msg=file)
