"""The chief alone writes files; a subclass of a writer that does more than that runs on all workers."""

import numpy as np
import pytest

OTHERS = ["Predicts", "Evaluates", "Looks", "EarlyStopping", "OwnPredicts"]


@pytest.fixture(scope="module")
def two(runs):
    return runs("multi_worker_mirrored", "writers_program")


def test_a_worker_leaves_out_what_only_writes(two):
    chief, worker = two[0]
    keras_own = ["CSVLogger", "Renamed", "TensorBoard", "ModelCheckpoint"]
    assert chief["kept"] == [*keras_own, *OTHERS[:-1], "Own", OTHERS[-1], "SaysSo"]
    assert worker["kept"] == OTHERS
    assert (chief["on instance"], worker["on instance"]) == (["CSVLogger", "Renamed"], ["Renamed"])


def test_a_subclass_may_predict_and_evaluate_in_a_hook(two):
    for results in two[0]:
        for name in ("predicted", "predicted by your own", "evaluated"):
            np.testing.assert_allclose(*results[name], rtol=1e-5)


def test_only_the_chief_writes_to_the_places_that_were_given(two):
    (chief, worker), out = two
    assert sorted(path.name for path in out.glob("*.keras")) == ["1.keras", "2.keras", "plain.keras"]
    assert chief["looked"] == str(out / "looks.csv") and len((out / "looks.csv").read_text().splitlines()) == 3
    assert len(list((out / "predicts" / "train").iterdir())) == 1  # a second writer would have a second file
    assert "/files/tfdist-" in worker["looked"], "in the supervisor's temporary folder, which goes with it"
    assert not worker["looked"].startswith(str(out))


def test_a_writer_of_ones_own_says_where_it_writes(two):
    out = two[1]
    for name in ("own.txt", "own_predicts.txt"):
        assert (out / name).read_text() == "rank 0\n" * 2
    rows = (out / "says_so.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows] == [["epoch", "rank"], ["0", "0"], ["1", "0"]]


def test_afterwards_a_worker_has_the_chiefs_places_and_no_files_of_its_own(two):
    (chief, worker), out = two
    given = [*(str(out / name) for name in ("predicts", "{epoch}.keras", "looks.csv")), out / "own_predicts.txt"]
    assert chief["places"] == worker["places"] == given
    assert chief["left"] == worker["left"] == []


def test_the_chief_alone_sends_to_a_server(two):
    chief, worker = two[0]
    assert chief["sent"] == ("http://127.0.0.1:9",) * 2
    assert worker["sent"][0].startswith("no address") and worker["sent"][1] == "http://127.0.0.1:9"


def test_keras_own_backups_are_replaced(two):
    for results in two[0]:
        seen, after = results["keras_backup"]
        assert any(name.startswith("step-") for names in seen for name in names)
        assert not any("latest.weights.h5" in names for names in seen) and after == []


def test_the_chief_that_saves_the_model_removes_the_backups_of_all_ranks_and_no_worker_does(two):
    for results in two[0]:
        left = results["backups left"]
        assert left["all"] == left["chief"] == []
        assert "manifest.json" in left["worker"] and "rank-1.index" in left["worker"]


def test_workers_that_leave_a_writer_out_have_the_same_callbacks_all_the_same(two):
    for results in two[0]:
        assert "differ from the chief's after epoch 1, though all tasks have the same callbacks" in results["spoiled"]
        assert "differ from the chief's at the end of the training" in results["spoiled, and not checked"]


def test_the_commands_scalars_do_not_hide_that_weights_differ(two):
    for results in two[0]:
        assert "differ from the chief's at the end of the training, though" in results["command"]


def test_what_all_save_to_one_path_is_whole_whenever_it_is_read(two):
    data = [".data-00000-of-00001", ".index"]
    exported = ["fingerprint.pb", "saved_model.pb", *(f"variables/variables{end}" for end in data)]
    checkpoints = ["managed/ckpt-2", "saved-1", "saved-2", "written"]
    files = {"a.weights.h5", "checkpoint", "managed/checkpoint", *(f"exported/{name}" for name in exported)}
    for results in two[0]:
        wrong, found = results["saved by all"]
        assert wrong == []
        assert set(found) == files | {name + end for name in checkpoints for end in data}
