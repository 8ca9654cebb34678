"""Compressors by the names that benchmarks give them, compressing from the first step on."""

from __future__ import annotations

from typing import Any

# Name to compressor and arguments, as `config.compression`.
COMPRESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "int8": ("int8", {}),
    "int8 sum": ("int8", {"transport": "sum"}),
    "powersgd": ("powersgd", {"start_powerSGD_iter": 0}),
    "powersgd r1": ("powersgd", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 1}),
    "topk": ("topk", {}),
    "topk exact": ("topk", {"selection": "exact"}),
}


def make(name: str) -> Any:
    """Returns the compressor; None for `"none"`."""
    from tfdist import compression
    from tfdist.config import CompressionConfig

    kind, arguments = COMPRESSORS[name]
    return compression.create(CompressionConfig(kind, **arguments))
