"""`Trainer.save` and `Trainer.export`, and Keras' writers of state in parts: the chief writes, and the other ranks wait for it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.collectives.ranks import Ranks
from tfdist.compat import laid_out, optimizer_search
from tfdist.compat.split_value import SplitValue, is_split, reading
from tfdist.errors import ClusterError, ConfigError, describe_error, format_value
from tfdist.layers.table import is_own, with_tables
from tfdist.runtime.folders import storage
from tfdist.runtime.report.phase import phase
from tfdist.sharding.split import view
from tfdist.strategies import model_methods, saving
from tfdist.training import checks
from tfdist.training.loop_context import LoopContext

_END = -1  # the chief has written the model


def save(context: LoopContext, model: keras.Model, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Saves `model` as one `.keras` file. A collective: raises WriteError on a chief that could not write, and ClusterError on the other ranks."""
    checks.check_is_model(model, "save")
    path = _as_text(path)
    if not path.endswith(".keras"):
        raise ConfigError(f"path must end in '.keras'. Received: {path!r}.")
    with phase("call", "save"):
        _by_chief(context, path, lambda: _save(model, path, **kwargs), _in_parts(model))


def write_together(
    context: LoopContext, saveable: keras.Model | keras.layers.Layer, path: str, write: Callable[[], None]
) -> bool:
    """Calls `write` on the chief, which reads whole values, if state of a model or layer is in parts on the workers; returns whether it is.

    A collective then, which raises the same errors as `save`. Returns False in a `fit` whose callbacks differ, as one rank may save alone.

    Raises:
        ConfigError: The format cannot hold the state.
    """
    if context.ranks.size == 1:
        return False
    split = _in_parts(saveable)
    if split:
        checks.check_format(path)
    if not split or (context.is_at_work and context.callbacks_differ):
        return False
    with phase("call", "save"):
        _by_chief(context, path, write, split)
    return True


def may_be_in_parts(context: LoopContext, model: keras.Model) -> bool:
    """Returns whether a model that a training builds may have state of which each worker holds a part."""
    strategy = context.strategy
    splits = strategy.splits_state or any(map(is_own, model.variables))
    return context.ranks.size > 1 and splits


def _in_parts(saveable: keras.Model | keras.layers.Layer) -> list[SplitValue]:
    """Returns the variables, slots and tables of a model or layer of which each worker holds a part."""
    optimizers = optimizer_search.optimizers(saveable) if isinstance(saveable, keras.Model) else []
    variables = [*saveable.variables, *(v for o in optimizers for v in o.variables)]
    return [value for value in with_tables(variables, optimizers) if is_split(value) and value.is_divided]


def export(context: LoopContext, model: keras.Model, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Exports `model` to the folder `path` for inference. A collective; raises the same errors as `save`."""
    checks.check_is_model(model, "export")
    path = _as_text(path)
    pieces = list(filter(laid_out.is_laid_out, model.variables))

    def write() -> None:
        exported = saving.outside_of_scopes(_whole_copy, model) if pieces else model
        with saving.beside(path) as partial:
            saving.outside_of_scopes(model_methods.keras_own("export"), exported, partial, **kwargs)

    _by_chief(context, path, write, pieces)


def _whole_copy(model: keras.Model) -> keras.Model:
    """Returns a copy of a model with whole variables, as a graph that is loaded alone needs them."""
    copy = keras.models.clone_model(model)
    if not copy.built:
        copy.build_from_config(model.get_build_config())
    for whole, variable in zip(copy.variables, model.variables, strict=True):
        whole.assign(variable.numpy())
    return copy


def _as_text(path: Any) -> str:
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise ConfigError(f"path must be a str or a pathlib.Path, and not empty. Received: {format_value(path)}.")
    return path


def _by_chief(context: LoopContext, path: str, write: Callable[[], None], split: Sequence[SplitValue] = ()) -> None:
    # A custom loop may have changed the statistics since the last synchronization.
    context.strategy.statistics.desynchronize()
    context.strategy.statistics.synchronize()
    error: Exception | None = None
    with _whole_on_chief(split, context.ranks):
        if context.is_chief:
            try:
                saving.make_folder(path)
                with context.engine.explaining_errors(), context.working(), phase("saving"):
                    write()
            except Exception as e:  # raised below, once the other ranks know it: they wait in a collective
                error = e
    reason = ""
    if error:
        reason = describe_error(error)
    reason = context.ranks.agree(reason)
    if error:
        raise error
    if reason:
        raise ClusterError(f"The chief could not write {path!r}: {reason}")


@contextlib.contextmanager
def _whole_on_chief(split: Sequence[SplitValue], ranks: Ranks) -> Iterator[None]:
    """Lets the chief read values of which each worker holds a part within the context; the other ranks send their elements before it. A collective."""
    if not split:
        yield
        return
    if not ranks.is_chief:
        # The chief says what it reads, as Keras may read a value twice, in another order, or not at all.
        number, begin, end = _broadcast(ranks)
        while number != _END:
            _read_chunk(split[number], range(begin, end), ranks)
            number, begin, end = _broadcast(ranks)
        yield
        return

    def read(number: int, chunk: np.ndarray, begin: int) -> None:
        rows = range(begin, begin + len(chunk))
        _broadcast(ranks, number, rows.start, rows.stop)
        _read_chunk(split[number], rows, ranks, chunk)

    try:
        with reading({value.key: functools.partial(read, number) for number, value in enumerate(split)}):
            yield
    finally:
        _broadcast(ranks)


def _broadcast(ranks: Ranks, number: int = _END, begin: int = 0, end: int = 0) -> tuple[int, int, int]:
    """Returns the chief's number of a value, and its rows that the chief reads."""
    number, begin, end = map(int, ranks.gather(number, begin, end)[0])
    return number, begin, end


def _read_chunk(value: SplitValue, rows: range, ranks: Ranks, chunk: np.ndarray | None = None) -> None:
    """Reads rows of a value into `chunk` on the chief; the other ranks, with None, send their elements. A collective."""
    own = [elements for _, elements in value.own(rows)]
    for rank in range(ranks.size):
        overlap = value.split.overlap(rank, rows)
        if overlap is None:
            continue
        elements = own[0] if rank == ranks.rank else None
        if rank:
            content = () if elements is None else [elements.reshape(-1).view(np.uint8)]
            elements = ranks.send(rank, content, target=0)
        if chunk is not None and elements is not None:
            place = view(chunk, overlap[0])
            place[...] = elements.view(chunk.dtype).reshape(place.shape)


def _save(model: keras.Model, path: str, overwrite: bool = True, **kwargs: Any) -> None:
    if not overwrite and storage.exists(path):
        raise FileExistsError(f"path {path!r} exists, and overwrite=False was given.")
    with saving.beside(path) as partial:
        saving.outside_of_scopes(model_methods.keras_own("save"), model, partial, **kwargs)
