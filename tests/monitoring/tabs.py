"""What TensorBoard's server shows beside the curves: its tabs HParams, Text and Custom Scalars."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

ASKED = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_SUCCESS", "STATUS_RUNNING", "STATUS_UNKNOWN"]}


def groups(ask):
    """Returns the groups of sessions that the tab HParams shows."""
    return ask("hparams/session_groups", request=json.dumps(ASKED))["sessionGroups"]


def status(ask):
    """Returns the status of each session."""
    return [session["status"] for group in groups(ask) for session in group["sessions"]]


def check(ask, keras_own, last):
    """Asserts that a server shows what `tensorboard_program` writes beside the curves, each once.

    Args:
        ask: Asks the server.
        keras_own: The curves of the same training by Keras alone.
        last: The last step.
    """
    (group,) = groups(ask)
    first = {"Batch size": 10.0, "Learning rate": 0.1, "Replicas": 1.0, "Strategy": "one_device"}
    experiment = ask("hparams/experiment", request=json.dumps({"hparamsLimit": 0}))
    assert [info["name"] for info in experiment["hparamInfos"]][:4] == list(first)
    assert group["hparams"] == {
        **first,
        "optimizer.name": "sgd",
        "optimizer.clipnorm": "None",
        "decay": 1.0,
        "nesterov": False,
    }
    assert [session["status"] for session in group["sessions"]] == ["STATUS_SUCCESS"]
    metrics = {each["name"]["tag"]: (each["trainingStep"], each["value"]) for each in group["metricValues"]}
    expected = {"final/loss": keras_own["train"], "final/val_loss": keras_own["validation"]}
    assert metrics.keys() - {"final/learning_rate"} == expected.keys()
    for tag, own in expected.items():
        assert metrics[tag] == pytest.approx((last, own["epoch_loss"][-1][1]), rel=1e-5)
    assert {run: sorted(tags) for run, tags in ask("text/tags").items()} == {
        "train": ["charts", "cluster", "strategy", "versions"]
    }
    texts = {tag: ask("text/text", run="train", tag=tag) for tag in ("cluster", "strategy", "versions")}
    assert {tag: len(events) for tag, events in texts.items()} == dict.fromkeys(texts, 1)
    for tag, cells in {
        "cluster": ["worker:0", "this process"],
        "strategy": ["one_device", "1"],
        "versions": ["tensorflow", tf.__version__, "keras", keras.__version__, "numpy", np.__version__],
    }.items():
        assert [cell for cell in re.findall("<td>(.*?)</td>", texts[tag][0]["text"]) if cell in cells] == cells, tag
    (charts,) = ask("text/text", run="train", tag="charts")
    assert 'href="#custom_scalars"' in charts["text"] and "Custom Scalars" in charts["text"]
    described = {tag: of["description"] for tag, of in ask("tags")["train"].items()}
    assert "milliseconds" in described["perf/step_ms"] and "bytes" in described["system/rss_bytes"]
    assert [tag for tag, text in described.items() if "/" in tag and not text] == []
    (page,) = ask("custom_scalars/layout")["category"]
    shown = {}
    for chart in page["chart"]:
        (tags,) = chart["multiline"]["tag"]
        answers = {run: ask("custom_scalars/scalars", run=run, tag=tags) for run in ("train", "validation")}
        assert all(answer["regex_valid"] for answer in answers.values())
        shown[chart["title"]] = {run: sorted(answer["tag_to_events"]) for run, answer in answers.items()}
    assert shown == {
        "Is it learning? (loss)": {"train": ["batch_loss"], "validation": ["evaluation_loss_vs_iterations"]},
        "How fast is it? (examples per second)": {"train": ["perf/examples_per_second"], "validation": []},
        "Who is slow? (ms per step)": {"train": ["perf/step_ms"], "validation": []},
        "What did the network cost? (bytes per step)": {"train": [], "validation": []},
    }
