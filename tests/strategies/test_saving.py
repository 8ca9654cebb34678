"""What is saved replaces what is at its path whole, and leaves nothing beside it."""

import os

import keras
import pytest
import tensorflow as tf

from tfdist.strategies import saving


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras", "exported", "a.b", "m[1]*"])
def test_a_file_replaces_a_file(tmp_path, name):
    (tmp_path / name).write_text("before")
    with saving.beside(tmp_path / name) as partial:
        assert partial != str(tmp_path / name)
        tf.io.gfile.GFile(partial, "w").write("after")
        assert (tmp_path / name).read_text() == "before"
    assert files(tmp_path) == {name: "after"}


def test_a_new_folder_appears_in_one_step(tmp_path):
    with saving.beside(tmp_path / "out") as partial:
        tf.io.gfile.makedirs(f"{partial}/sub")
        tf.io.gfile.GFile(f"{partial}/sub/one", "w").write("after")
        written = os.stat(partial).st_ino
    assert files(tmp_path) == {"out/sub/one": "after"} and os.stat(tmp_path / "out").st_ino == written


def test_a_folder_replaces_the_files_that_a_folder_has(tmp_path):
    (tmp_path / "out/sub").mkdir(parents=True)
    (tmp_path / "out/sub/one").write_text("before")
    with saving.beside(str(tmp_path / "out") + "/") as partial:
        tf.io.gfile.makedirs(f"{partial}/sub/deep")
        for name in ("top", "sub/one", "sub/deep/two"):
            tf.io.gfile.GFile(f"{partial}/{name}", "w").write("after")
    assert files(tmp_path) == {"out/top": "after", "out/sub/one": "after", "out/sub/deep/two": "after"}


def test_a_checkpoint_is_every_file_that_begins_with_its_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck-10.index").write_text("another")
    with saving.beside("ck-1") as partial:
        for end in (".index", ".data-00000-of-00001"):
            tf.io.gfile.GFile(partial + end, "w").write("after")
    assert files(tmp_path) == {"ck-10.index": "another", "ck-1.index": "after", "ck-1.data-00000-of-00001": "after"}


def test_what_fails_changes_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/one").write_text("before")
    with pytest.raises(OSError, match="disk"), saving.beside(tmp_path / "out") as partial:
        tf.io.gfile.makedirs(partial)
        tf.io.gfile.GFile(f"{partial}/one", "w").write("after")
        raise OSError("the disk is full")
    assert files(tmp_path) == {"out/one": "before"}


def test_an_export_says_where_it_is(mirrored, tmp_path, capsys):
    with mirrored.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.export(tmp_path / "exported")
    said = capsys.readouterr().out
    assert f"Saved artifact at '{tmp_path / 'exported'}'" in said and "partial" not in said
    assert tf.saved_model.load(str(tmp_path / "exported")).serve(tf.ones([3, 2])).shape == (3, 1)
