"""Compressors, which sum gradients with fewer bytes on the wire, and wrappers around them."""

from tfdist.compression.base import Compressor, NoCompression
from tfdist.compression.cast import BF16, FP16
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.factory import create
from tfdist.compression.int8 import Int8
from tfdist.compression.per_variable import PerVariable
from tfdist.compression.powersgd import PowerSGD
from tfdist.compression.topk import TopK
from tfdist.compression.warmup import Warmup
from tfdist.config.constraints import option

__all__ = [
    "BF16",
    "FP16",
    "Compressor",
    "ErrorFeedback",
    "Int8",
    "NoCompression",
    "PerVariable",
    "PowerSGD",
    "TopK",
    "Warmup",
    "create",
    "option",
]
