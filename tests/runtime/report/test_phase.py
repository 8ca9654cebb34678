"""The phase of a process: nesting, threads, the labels of errors, and `tfdist.slow`."""

from __future__ import annotations

import threading

import pytest

import tfdist
from tfdist.errors import ConfigError
from tfdist.runtime.report import phase as phase_lib
from tfdist.runtime.report.phase import Phases, phase


def test_phases_nest_and_an_exchange_within_a_step_belongs_to_it():
    phases, activities = Phases(), []
    phases.readers["test"] = activities.append
    with phase("call", "fit", phases=phases), phase("training", phases=phases):
        with phase("step", "a step", is_first=True, phases=phases), phase("exchange", phases=phases):
            assert (phases.now.name, phases.exchanges) == ("step", 0)
        with phase("step", "a step", phases=phases):
            assert phases.now.labels == ["fit", "a step"]
        with phase("saving", phases=phases), phase("exchange", phases=phases):
            assert (phases.now.name, phases.now.activity, phases.exchanges) == ("exchange", "saving", 1)
    assert phases.now.name == "" and phases.steps == 2
    assert activities == ["training", "compiling", "training", "saving", "training", ""]


def test_another_thread_has_no_effect_within_a_phase():
    phases, seen = Phases(), []

    def run():
        with phase("saving", phases=phases):
            seen.append(phases.now.name)

    def in_thread():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(10)

    with phase("training", phases=phases):
        in_thread()
        assert phases.now.name == "training"
    in_thread()
    assert seen == ["training", "saving"], "outside of all phases any thread may begin one"


def test_an_error_has_the_labels_of_the_phase_in_which_it_was_raised():
    with pytest.raises(ValueError, match="mine") as raised, phase("call", "fit"), phase("step", "a step"):
        raise ValueError("mine")
    assert phase_lib.labels(raised.value) == ["fit", "a step"]
    assert phase_lib.labels(ValueError("another")) == []


def test_a_section_is_the_innermost():
    with tfdist.slow("outer", seconds=60), tfdist.slow("upload", 0):
        section = phase_lib.main.now.section
        assert (section.label, section.seconds) == ("upload", 0)
    assert phase_lib.main.now.section is None


@pytest.mark.parametrize(
    ("name", "seconds", "told"),
    [
        ("", 3, "name must be a text, such as 'upload'. Received: ''."),
        (3, 3, "name must be a text, such as 'upload'. Received: 3."),
        ("upload", -1, "seconds must be a number of at least 0, where 0 means no limit. Received: -1."),
        ("upload", "3", "seconds must be a number of at least 0, where 0 means no limit. Received: '3'."),
        ("upload", float("nan"), "Received: nan."),
        ("upload", True, "Received: True."),
    ],
)
def test_a_wrong_argument_of_slow_is_an_error(name, seconds, told):
    with pytest.raises(ConfigError, match="slow: ") as raised:
        tfdist.slow(name, seconds)
    assert told in str(raised.value)
