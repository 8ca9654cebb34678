"""`tfdist backup`: what it shows of a folder of backups, and what it refuses."""

from __future__ import annotations

import json
import os
import uuid

import pytest

from tests.backup.test_storage import write
from tfdist import __main__ as command
from tfdist.backup.contents import SavePoint
from tfdist.backup.storage import Storage
from tfdist.commands.backup import find_backups
from tfdist.runtime.folders import storage as urls


def run(capsys, *words):
    code = command.main(["tfdist", "backup", *map(str, words)])
    return code, *capsys.readouterr()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def backups(tmp_path):
    """The folder of two backups of two tasks."""
    folder = tmp_path / "backup"
    for step in (7, 14):
        write(folder, step, ranks=2, replicas=4)
    return folder


def test_a_folder_of_backups_is_shown_as_a_table(capsys, backups):
    code, out, err = run(capsys, "show", backups)
    assert (code, err) == (0, "")
    folder, heads, *rows = out.splitlines()
    assert folder == str(backups)
    assert [row.split()[0] for row in rows] == ["step-14", "step-7"], "the newest first"
    cells = rows[0].replace(" MB", "MB").split()
    assert " ".join(heads.split()) == "backup step epoch written tasks replicas size task strategy state"
    assert (cells[1:3], cells[5:7], cells[8:]) == (["14", "1"], ["2", "4"], ["-", "-", "whole"])


def test_all_checksums_are_verified_and_what_is_damaged_is_named(capsys, backups):
    flip(backups / "step-14/rank-1.data-00000-of-00001")
    write(backups, 28, ranks=2, keep=9)
    (backups / "step-21").mkdir()
    flip(backups / "step-28/manifest.json")
    before = sorted((path, path.stat().st_mtime_ns) for path in backups.rglob("*"))
    code, out, err = run(capsys, "show", backups, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["backups"]
    assert [(each["step"], each["state"]) for each in found] == [
        (28, "damaged"),
        (21, "unfinished"),
        (14, "damaged"),
        (7, "whole"),
    ]
    assert [each["tasks"] for each in found] == [None, None, 2, 2]
    assert f"{backups}/step-14/rank-1 differs from the data written" in found[2]["why"] and not found[3]["why"]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in backups.rglob("*")), "nothing was written"
    assert f"step-14: {backups}/step-14/rank-1 differs from the data written" in run(capsys, "show", backups)[1]


def test_a_backup_that_is_being_removed_is_not_shown(capsys, backups):
    Storage(str(backups), 0, 2).remove(SavePoint(14, False))  # to which the other rank has not come
    assert [path.name for path in (backups / "step-14").glob("rank-*.index")] == ["rank-1.index"]
    code, out, _ = run(capsys, "show", backups)
    assert code == 0 and "step-14" not in out and "unfinished" not in out
    Storage(str(backups), 1, 2).remove(SavePoint(14, False))
    assert not (backups / "step-14").exists()


def test_no_whole_backup_is_exit_code_1(capsys, backups):
    for step in (7, 14):
        flip(backups / f"step-{step}/shared.index")
    code, out, _ = run(capsys, "show", backups)
    assert (code, out.count(" damaged\n")) == (1, 2)


def test_the_backups_of_a_work_directory_are_found(capsys, backups, tmp_path):
    assert run(capsys, "show", tmp_path)[1].splitlines()[0] == str(backups), "of a script, which has no config.json"
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, 3)
    (tmp_path / "config.json").write_text(json.dumps({"backup": {"dir": str(elsewhere)}}))
    assert run(capsys, "show", tmp_path)[1].splitlines()[0] == str(elsewhere)
    (tmp_path / "config.json").write_text("{")
    code, _, err = run(capsys, "show", tmp_path)
    assert code == 2 and f"{tmp_path}/config.json is not a file of a run: JSONDecodeError" in err


def test_the_backups_of_a_work_directory_at_a_url_are_found(capsys):
    workdir = f"memory://{uuid.uuid4().hex}/run"
    write(f"{workdir}/backup", 7)
    urls.write(f"{workdir}/config.json", b'{"backup": {"dir": ""}}')
    for path in (workdir, f"{workdir}/", f"{workdir}/backup", f"{workdir}/backup/"):
        code, out, _ = run(capsys, "show", path)
        assert (code, out.splitlines()[0]) == (0, f"{workdir}/backup")
        assert find_backups(path)[1] == f"{workdir}/config.json", "for export"
    urls.write(f"{workdir}/config.json", json.dumps({"backup": {"dir": f"{workdir}/elsewhere"}}).encode())
    assert run(capsys, "show", workdir)[2] == (
        f"tfdist: '{workdir}/elsewhere' has no backup: the run has not saved any yet, or has ended and removed them.\n"
    )
    urls.remove(f"{workdir}/config.json")
    assert run(capsys, "show", workdir)[1].splitlines()[0] == f"{workdir}/backup", "of a script"


def test_faulty_words_are_one_sentence_each(capsys, backups, tmp_path):
    (tmp_path / "there.keras").touch()
    for words, said in {
        ("shwo", "x"): "unknown command 'shwo'; did you mean 'show'? Known: export, show.",
        (
            "show",
        ): "Usage: tfdist backup show DIR [--json], or tfdist backup export DIR OUT.keras [--step=N]. Received: show",
        ("show", backups, "--jsno"): "unknown flag '--jsno'; did you mean '--json'? Known: --help, --json, --step.",
        (
            "show",
            tmp_path / "no",
        ): f"'{tmp_path}/no' is not a folder; give a run's work directory, or the folder of its backups.",
        ("export", backups, "a.h5"): "The model's file must end in '.keras'. Received: 'a.h5'.",
        (
            "export",
            backups,
            tmp_path / "there.keras",
        ): f"{tmp_path}/there.keras exists already; choose another name for the model.",
        (
            "export",
            backups,
            tmp_path / "out.keras",
        ): f"'{backups}' has no config.json of a run beside it, which is needed to build the "
        "model. Give the work directory of a run of tfdist train; for a script, build the model in it, and call fit with the same backup_dir.",
    }.items():
        assert run(capsys, *words) == (2, "", f"tfdist: {said}\n")
    (tmp_path / "empty").mkdir()
    said = f"tfdist: '{tmp_path}/empty' has no backup: the run has not saved any yet, or has ended and removed them.\n"
    assert run(capsys, "show", tmp_path / "empty") == (1, "", said)


@pytest.mark.parametrize("locked", ["run", "run/backup"])
def test_a_folder_that_may_not_be_read_is_a_sentence(tmp_path, monkeypatch, capsys, locked):
    (tmp_path / "run" / "backup").mkdir(parents=True)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / locked).chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        code, _, err = run(capsys, "show", "run")
    finally:
        if user == 0:
            os.seteuid(0)
        (tmp_path / locked).chmod(0o700)
    assert code == 2
    assert "cannot be read: Permission denied; read it as the user who ran it." in err
