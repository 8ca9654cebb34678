"""What the commands share: dashes in names of flags, unknown names, and output that nobody reads."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from absl import flags

from tests.helpers import tiers
from tfdist import __main__ as command
from tfdist.config import command_line
from tfdist.errors import ConfigError
from tfdist.version import __version__

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def values():
    values = flags.FlagValues()
    flags.DEFINE_integer("max_restarts", 0, "", flag_values=values)
    flags.DEFINE_string("log_dir", "", "", flag_values=values)
    flags.DEFINE_bool("dry_run", True, "", flag_values=values)
    return values


@pytest.mark.parametrize(
    ("arguments", "expected", "left"),
    [
        (["--max-restarts=3"], (3, "", True), []),
        (["--max-restarts", "3", "a-b"], (3, "", True), ["a-b"]),
        (["-max_restarts=3"], (3, "", True), []),
        (["--nodry-run"], (0, "", False), []),
        (["--no-dry-run", "--no_dry_run"], (0, "", False), []),
        (["--log-dir=a-b=c-d"], (0, "a-b=c-d", True), []),
        (["--log-dir", "--max-restarts"], (0, "--max-restarts", True), []),  # a value, whatever it looks like
        (["--dry-run", "--log-dir=x"], (0, "x", True), []),
        (["a", "--", "--max-restarts=3"], (0, "", True), ["a", "--max-restarts=3"]),
    ],
)
def test_dashes_in_names_are_underscores_and_values_stay(values, arguments, expected, left):
    assert command_line.read_flags(values, ["program", *arguments])[1:] == left
    assert (values.max_restarts, values.log_dir, values.dry_run) == expected


def test_what_is_left_to_the_caller_stays_as_it_is(values):
    left = ["--config.save-freq=3", "--x-y"]
    arguments = ["program", "--max-restarts=1", *left]
    assert command_line.read_flags(values, arguments, known_only=True) == ["program", *left]


@pytest.mark.parametrize("arguments", [["--undefok=max", "--max=3"], ["-undefok", "a"], ["--flagfile={}"]])
def test_what_would_hide_misspelt_flags_is_refused_and_not_in_the_help(values, arguments, tmp_path):
    (tmp_path / "flags").write_text("--undefok=max\n")
    with pytest.raises(ConfigError, match=r"^--undefok is not supported, as it hides misspelled flags"):
        command_line.read_flags(values, ["program", *(each.format(tmp_path / "flags") for each in arguments)])
    shown = command_line.help_text(values)
    assert "undefok" not in shown and "okay to specify" not in shown and "--flagfile" in shown and "--log_dir" in shown


def test_an_unknown_flag_is_answered_with_the_nearest(values):
    known = "Known: --dry_run, --log_dir, --max_restarts."
    with pytest.raises(ConfigError) as raised:
        command_line.read_flags(values, ["program", "--max-restart=3"])
    assert str(raised.value) == f"unknown flag '--max-restart'; did you mean '--max_restarts'? {known}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trian", "--config=digits"],
            "unknown command 'trian'; did you mean 'train'? Known: backup, cluster, doctor, launch, stacks, train, verify.\n",
        ),
        (["help", "trian"], "unknown command 'trian'; did you mean 'train'? "),
        (["--verison"], "unknown flag '--verison'; did you mean '--version'? Known: --help, --version.\n"),
        ([], "Usage: tfdist COMMAND [FLAGS]; tfdist --help lists the commands.\n"),
        (["doctor", "--no-device"], "unknown flag '--no-device'; did you mean '--devices'? "),
        (["backup", "shwo", "docs"], "unknown command 'shwo'; did you mean 'show'? "),
        (["backup", "export", "docs", "x", "--stpe=1"], "unknown flag '--stpe'; did you mean '--step'? "),
        (["cluster", "show", "--fromat=json"], "unknown flag '--fromat'; did you mean '--format'? "),
        (
            ["cluster", "emit", "--config=digits", "--targte=slurm"],
            "unknown flag --targte; did you mean '--target'? Known: --config, --config.field, --workdir, --overwrite, --help, --target, --name, ",
        ),
        (["cluster", "emit", "--config=digits", "--memroy=1G"], "unknown flag --memroy; did you mean '--memory'? "),
        (["cluster", "chek"], "unknown command 'chek'; did you mean 'check'? Known: check, emit, show.\n"),
        (
            ["launch", "--max-restart=1", "--", "true"],
            "unknown flag '--max-restart'; did you mean '--max_restarts'? Known: --cpus_per_worker, --gpus_per_worker, --grace_seconds, --help, --hostfile, --hosts, "
            "--join_seconds, --log_dir, --max_restarts, --nnodes, --ps, --ps_hosts, --ray, --replicas, --stdin, --task, --warm, --workers, --workers_per_host.\n",
        ),
        (["train", "--config=digit"], "tfdist: --config=digit: no such file, and no preset; did you mean 'digits'? "),
        (["train", "--wrokdir=x"], "tfdist: --config is missing: "),
        (["train", "--wrokdir=x"], "tfdist: unknown flag --wrokdir; did you mean '--workdir'? "),
    ],
)
def test_a_wrong_name_suggests_the_nearest(capsys, words, said):
    assert command.main(["tfdist", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and (said == err if said.endswith("\n") else said in err)


def test_help_names_every_command_and_each_names_both_ways_to_start_it(capsys):
    assert command.main(["tfdist", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, _) in command.COMMANDS.items():
        assert f"    tfdist {name} " in shown
        assert command.main(["tfdist", name, "--help"]) == 0
        assert f"tfdist {name} " in (of_command := capsys.readouterr().out)
        assert f"python -m {module if name in ('stacks', 'verify') else f'tfdist.{name}'}" in of_command
        assert command.main(["tfdist", "help", name]) == 0
        assert capsys.readouterr().out == of_command
    assert command.main(["tfdist", "help"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster"], "--memory: For `emit`: Memory for each task, as `4G`."),
        (["cluster"], "--[no]connect: For `check`: try this task's port, and the names and"),
        (["doctor"], "--[no]devices: Check the devices; this loads TensorFlow."),
        (["backup"], "--[no]json: Print JSON, for `show`."),
        (["launch"], "-n,--workers: Number of training tasks on this machine."),
        (["train", "--helpfull"], "(--noconfig.FIELD is short for --config.FIELD=false)"),
    ],
)
def test_help_explains_a_flag(capsys, words, told):
    assert command.main(["tfdist", *words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown and "see `tfdist.cluster" not in shown and "--[no]no" not in shown


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_tells_the_version(capsys, name):
    assert command.main(["tfdist", name, "--version"]) == 0
    assert capsys.readouterr() == (f"tfdist {__version__}\n", "")


@pytest.mark.parametrize("name", tiers.cases(["", *command.COMMANDS], quick=["train", "launch"]))
def test_a_reader_that_goes_away_is_no_traceback(name):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "tfdist", *([name] if name else []), "--help"]
    try:
        done = subprocess.run(words, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
