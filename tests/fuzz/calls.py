"""Trains a case by calls on batches, or by several `fit`s on one generator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tests.fuzz import models
from tests.fuzz.cases import Case

History = dict[str, list[float]]


def train(case: Case, trainer: tfdist.Trainer, model: keras.Model, callbacks: list[Any]) -> History:
    """Trains a model; returns the logs of each pass."""
    history: History = {}
    passes = _on_batches(case, model) if case.loop == "on_batch" else _fits(case, trainer, model, callbacks)
    for logs in passes:
        for name, value in logs.items():
            history.setdefault(name, []).append(value)
    return history


def _validation(logs: dict[str, Any]) -> dict[str, Any]:
    return {f"val_{name}": value for name, value in logs.items()}


def _on_batches(case: Case, model: keras.Model) -> Iterator[dict[str, Any]]:
    weighted = case.weights is not None
    validation = models.make_data(case, case.validation[0], 1, weighted) if case.validation else None
    for batch in itertools.chain(*[_batches(case)] * case.epochs):
        yield model.train_on_batch(*batch, class_weight=case.class_weight, return_dict=True)
        if validation:
            yield _validation(model.test_on_batch(*validation, return_dict=True))


def _fits(case: Case, trainer: tfdist.Trainer, model: keras.Model, callbacks: list[Any]) -> Iterator[dict[str, Any]]:
    source = (batch for batch in itertools.cycle(_batches(case)))
    given = {"steps_per_epoch": case.fit_steps, "class_weight": case.class_weight, "callbacks": callbacks}
    for _ in range(case.epochs):
        history = trainer.fit(model, source, **given, verbose=0).history
        yield {name: values[0] for name, values in history.items()}
        if case.evaluated_steps:
            found = trainer.evaluate(model, source, steps=case.evaluated_steps, return_dict=True, verbose=0)
            yield _validation(found)


def _batches(case: Case) -> list[tuple[Any, ...]]:
    """Returns the batches of an epoch."""
    data = models.make_data(case, case.rows, 0, case.weights is not None)
    firsts = range(0, case.rows, case.batch)
    return [tf.nest.map_structure(lambda array, f=first: array[f : f + case.batch], data) for first in firsts]
