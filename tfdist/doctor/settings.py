"""Variables of the environment that change how Keras, TensorFlow, NCCL and the system's allocator work. No TensorFlow here."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping

from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, shorten
from tfdist.runtime import tensorflow_log
from tfdist.runtime.files import read_file

_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_LESS_SURE = "unset it, unless all tasks need it and have the same"
# What is worth knowing when it is set, and what to do.
_NOTED = {
    "TF_DETERMINISTIC_OPS": "unset it: --config.deterministic does this, or tf.config.experimental.enable_op_determinism()",
    "TF_CUDNN_DETERMINISTIC": "unset it: --config.deterministic does this, or tf.config.experimental.enable_op_determinism()",
    "TF_GPU_THREAD_MODE": "unset it: not needed",
    "TF_GPU_THREAD_COUNT": "unset it: not needed",
    "TF_FORCE_GPU_ALLOW_GROWTH": "unset it, unless the GPU is shared with others",
    "TF_ENABLE_ONEDNN_OPTS": "give all tasks the same: it changes results in the last digits",
    "TF_XLA_FLAGS": _LESS_SURE,
    "XLA_FLAGS": _LESS_SURE,
    "LD_PRELOAD": "unset it, unless you need it: tfdist then leaves the memory allocator as it is, and steps may be slower",
    "GLIBC_TUNABLES": "unset it, unless you need it: tfdist then leaves the memory allocator as it is, and steps may be slower",
}
_PREFIXES = {
    "NCCL_": "unset it, unless this network needs it; all tasks must have the same",
    "MALLOC_": _NOTED["LD_PRELOAD"],
}
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about variables that are set. The value of no other variable is shown."""
    yield keras_backend(environ)
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        yield Finding(
            WARNING,
            "TF_USE_LEGACY_KERAS",
            shorten(environ["TF_USE_LEGACY_KERAS"]),
            "unset it: tf.keras is then Keras 2, whose models tfdist does not train; or write import keras",
        )
    yield from _log_level(environ)
    yield from _threads(environ)
    for name in sorted(environ):
        remedy = _NOTED.get(name) or next((text for start, text in _PREFIXES.items() if name.startswith(start)), "")
        if remedy:
            yield Finding(NOTE, shorten(name), shorten(environ[name]), remedy)
    yield from _proxies(environ)


def keras_backend(environ: Mapping[str, str]) -> Finding:
    """Returns on which framework Keras will run: as the variable says, else as its file does."""
    remedy = "export KERAS_BACKEND=tensorflow: tfdist trains on TensorFlow alone"
    if "KERAS_BACKEND" in environ:
        chosen = environ["KERAS_BACKEND"]
        return (
            Finding(OK, "KERAS_BACKEND", chosen)
            if chosen in ("", "tensorflow")
            else Finding(ERROR, "KERAS_BACKEND", shorten(chosen), remedy)
        )
    home = environ.get("KERAS_HOME") or str(pathlib.Path(environ.get("HOME") or "~").expanduser() / ".keras")
    file = pathlib.Path(home, "keras.json")
    try:
        found = json.loads(read_file(file))
        chosen = str(found.get("backend", "tensorflow"))
    except FileNotFoundError:
        return Finding(OK, "Keras backend", "tensorflow")
    except (OSError, ValueError, AttributeError, RecursionError):
        return Finding(WARNING, "Keras backend", f"{shorten(str(file))} cannot be read", "correct or remove the file")
    where = f"{shorten(chosen)}, by {shorten(str(file))}"
    return (
        Finding(OK, "Keras backend", where)
        if chosen == "tensorflow"
        else Finding(ERROR, "Keras backend", where, remedy)
    )


def _log_level(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = tensorflow_log.LEVEL
    if environ.get(name, "") > "2":
        yield Finding(WARNING, name, shorten(environ[name]), f"export {name}=2: TensorFlow's errors are not shown now")
    elif name in environ:
        yield Finding(NOTE, name, shorten(environ[name]), "unset it: tfdist's commands set 2")


def _threads(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in _THREADS:
        if value := environ.get(name, ""):
            is_count = value.isascii() and value.isdigit() and len(value) < 10
            nested = name == "OMP_NUM_THREADS" and all(each.strip().isdigit() for each in value.split(","))
            if is_count or nested:
                yield Finding(
                    NOTE, name, shorten(value), "unset it to use all processors; all tasks must have the same"
                )
            else:
                yield Finding(WARNING, name, shorten(value), "give a whole number, the same in all tasks; or unset it")


def _proxies(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields proxies, without what stands before the host: a user's password."""
    proxies = {name: value.rpartition("@")[2] for name, value in environ.items() if name.lower() in _PROXIES and value}
    if not proxies:
        yield Finding(OK, "proxies", "none")
        return
    known = environ.get("no_proxy", environ.get("NO_PROXY", ""))
    around = f"; no_proxy: {shorten(known)}" if known else ""
    yield Finding(
        NOTE,
        "proxies",
        ", ".join(f"{name}={shorten(value)}" for name, value in sorted(proxies.items())) + around,
        "nothing for tfdist, which reaches the hosts of the cluster without them; your own servers: name them in no_proxy",
    )
