"""`Trainer.save` and `Trainer.export`, and Keras' writers of state in parts: the chief writes, and the other ranks wait for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.collectives.ranks import Ranks
from tfdist.compat import laid_out, optimizer_search, piece_optimizer
from tfdist.errors import ClusterError, ConfigError, describe_error, format_value
from tfdist.layers.table import Table, is_own, with_tables
from tfdist.runtime.folders import storage
from tfdist.runtime.report.phase import phase
from tfdist.sharding.split_slot import SplitSlot
from tfdist.strategies import model_methods, saving
from tfdist.training import checks
from tfdist.training.loop_context import LoopContext

_NO_SLOT = -1  # the chief has written the model


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


def _in_parts(saveable: keras.Model | keras.layers.Layer) -> list[Any]:
    """Returns the variables, slots and tables of a model or layer of which each worker may hold a part."""
    optimizers = optimizer_search.optimizers(saveable) if isinstance(saveable, keras.Model) else []
    variables = [*saveable.variables, *(v for o in optimizers for v in piece_optimizer.all_variables(o))]
    split: list[Any] = []
    for variable in with_tables(variables, optimizers):
        is_split = isinstance(variable, SplitSlot) or laid_out.is_laid_out(variable)
        if is_split or (isinstance(variable, Table) and variable.layout.is_on_workers):
            split.append(variable)
    return split


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


def _by_chief(context: LoopContext, path: str, write: Callable[[], None], split: Sequence[Any] = ()) -> None:
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
def _whole_on_chief(split: Sequence[Any], ranks: Ranks) -> Iterator[None]:
    """Lets the chief read whole values of `split` within the context; the other ranks send their parts before it. A collective.

    `split` are slots and tables, and variables and slots that live as pieces. The chief holds one of them at a time.
    """
    if not split:
        yield
        return
    if not ranks.is_chief:
        # The chief says what it reads, as Keras may read a slot twice, in another order, or not at all.
        number, begin = _broadcast(ranks)
        while number != _NO_SLOT:
            value = split[number]
            if isinstance(value, Table):
                _read_rows(value, value.chunk_from(begin), ranks)
            else:
                _read_whole(value, ranks)
            number, begin = _broadcast(ranks)
        yield
        return

    numbers = {_key(value): number for number, value in enumerate(split)}

    def read(value: Any) -> np.ndarray:
        _broadcast(ranks, numbers[_key(value)])
        return _read_whole(value, ranks)

    def read_rows(table: Table, rows: range) -> np.ndarray:
        _broadcast(ranks, numbers[_key(table)], rows.start)
        return _read_rows(table, rows, ranks)

    for value in split:
        if isinstance(value, Table):
            value.layout.read = read_rows
        else:
            value.read = read
    try:
        yield
    finally:
        for value in split:
            if isinstance(value, Table):
                value.layout.read = None
            else:
                value.read = None
        _broadcast(ranks)


def _broadcast(ranks: Ranks, number: int = _NO_SLOT, begin: int = 0) -> tuple[int, int]:
    """Returns the chief's number of a slot or table, and the first row of a chunk of it."""
    number, begin = map(int, ranks.gather(number, begin)[0])
    return number, begin


def _key(value: Any) -> int:
    """Returns a key of a slot or table: Keras' writer makes another object for a table's slot."""
    if isinstance(value, Table):
        return id(value.shards[0])
    return id(value)


def _read_rows(table: Table, rows: range, ranks: Ranks) -> np.ndarray:
    """Returns a chunk of a table on the chief, whose other workers send their rows. A collective."""
    chunk = np.empty((len(rows), *table.shape[1:]), table.dtype.as_numpy_dtype)
    ((part, own),) = table.own_rows(rows)
    chunk[part] = own
    for rank in range(1, ranks.size):
        content = [own.reshape(-1).view(np.uint8)] if rank == ranks.rank else ()
        received = ranks.send(rank, content, target=0)
        if received is not None:
            place = slice(rank, None, ranks.size)
            chunk[place] = received.view(own.dtype).reshape(chunk[place].shape)
    return chunk


def _read_whole(slot: Any, ranks: Ranks) -> np.ndarray:
    """Returns a whole slot, or variable that lives as pieces, on the chief, and anything on the others. A collective."""
    if laid_out.is_laid_out(slot):
        return laid_out.joined(slot)
    own = slot.piece.numpy()
    pieces = [own]
    for rank, held in enumerate(slot.pieces.ranges[1:], 1):
        if held.length:
            content = [own.view(np.uint8)] if rank == ranks.rank else ()
            received = ranks.send(rank, content, target=0)
            if received is not None:
                pieces.append(received.view(own.dtype))
    if not ranks.is_chief:
        return own
    return np.concatenate(pieces).reshape(slot.shape)


def _save(model: keras.Model, path: str, overwrite: bool = True, **kwargs: Any) -> None:
    if not overwrite and storage.exists(path):
        raise FileExistsError(f"path {path!r} exists, and overwrite=False was given.")
    with saving.beside(path) as partial:
        saving.outside_of_scopes(model_methods.keras_own("save"), model, partial, **kwargs)
