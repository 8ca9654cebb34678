"""`OptimizerConfig`: the optimizer and its arguments. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.config import registry
from tfdist.config.compression import option_faults
from tfdist.config.ranges import MOST_STEPS, Range
from tfdist.errors import collect_errors, did_you_mean, format_value

_ADAM: Mapping[str, type] = {"beta_1": float, "beta_2": float, "epsilon": float}

# Optimizer name to the arguments it takes besides the learning rate and those of every optimizer, and the type of each.
OPTIMIZERS: Mapping[str, Mapping[str, type]] = {
    "adadelta": {"rho": float, "epsilon": float},
    "adafactor": {
        **dict.fromkeys(("beta_2_decay", "epsilon_1", "epsilon_2", "clip_threshold"), float),
        "relative_step": bool,
    },
    "adagrad": {"initial_accumulator_value": float, "epsilon": float},
    "adam": {**_ADAM, "amsgrad": bool},
    "adamax": _ADAM,
    "adamw": {**_ADAM, "amsgrad": bool},
    "ftrl": {
        **dict.fromkeys(("learning_rate_power", "initial_accumulator_value", "beta"), float),
        **dict.fromkeys(("l1_regularization_strength", "l2_regularization_strength"), float),
        "l2_shrinkage_regularization_strength": float,
    },
    "lamb": _ADAM,
    "lion": {"beta_1": float, "beta_2": float},
    "muon": {
        **dict.fromkeys(("adam_beta_1", "adam_beta_2", "adam_weight_decay", "epsilon", "momentum", "rms_rate"), float),
        **dict.fromkeys(("muon_a", "muon_b", "muon_c", "adam_lr_ratio"), float),
        "exclude_layers": list,
        "exclude_embeddings": bool,
        "ns_steps": int,
        "nesterov": bool,
    },
    "nadam": _ADAM,
    "rmsprop": {"rho": float, "momentum": float, "epsilon": float, "centered": bool},
    "schedulefreeadamw": {**_ADAM, "warmup_steps": int},
    "sgd": {"momentum": float, "nesterov": bool},
}


# What Keras computes with is float32: nearer to 1 a share would be 1 there, a smaller number 0, and a larger one soon infinite.
_SHARE = Range(0, 0.9999999)
_POSITIVE = Range(1e-30, 1e3)
_AMOUNT = Range(0, 1e6)
_CLIP = Range(0, 1e30, off=True)
_STEPS = Range(0, MOST_STEPS, off=True)
_FLOAT = Range(-sys.float_info.max, sys.float_info.max)

# The range of each argument that is a number, of all optimizers; `_RANGES_OF` has those of one optimizer.
_RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("momentum", "rho", "beta_1", "beta_2", "adam_beta_1", "adam_beta_2", "ema_momentum"), _SHARE),
    **dict.fromkeys(("epsilon", "epsilon_1", "epsilon_2", "rms_rate"), _POSITIVE),
    **dict.fromkeys(
        ("weight_decay", "adam_weight_decay", "adam_lr_ratio", "initial_accumulator_value", "beta"), _AMOUNT
    ),
    **dict.fromkeys(("l1_regularization_strength", "l2_regularization_strength"), _AMOUNT),
    "l2_shrinkage_regularization_strength": _AMOUNT,
    **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm"), _CLIP),
    "clip_threshold": Range(1e-6, 1e30),
    "loss_scale_factor": Range(1e-6, 1e15),
    **dict.fromkeys(("warmup_steps", "ema_overwrite_frequency"), _STEPS),
    "beta_2_decay": Range(-10, 0),
    "learning_rate_power": Range(-10, 0),
    **dict.fromkeys(("muon_a", "muon_b", "muon_c"), Range(-10, 10)),
    "ns_steps": Range(1, 1000),
}
# Of one optimizer: with 0 Keras raises an error, or computes NaN.
_RANGES_OF: Mapping[tuple[str, str], Range] = {
    **dict.fromkeys((("lion", "beta_1"), ("schedulefreeadamw", "beta_1")), Range(1e-7, _SHARE.most)),
    ("ftrl", "initial_accumulator_value"): Range(1e-30, _AMOUNT.most),
}


EVERY_OPTIMIZER: Mapping[str, type] = {
    **dict.fromkeys(("weight_decay", "clipnorm", "clipvalue", "global_clipnorm"), float),
    "use_ema": bool,
    "ema_momentum": float,
    "ema_overwrite_frequency": int,
    "gradient_accumulation_steps": int,
    "loss_scale_factor": float,
}
_DECAYING = ("adamw", "muon")  # which decay weights even where no one says so


@dataclasses.dataclass
class OptimizerConfig:
    """A Keras optimizer's name and arguments, by Keras' names; what the optimizer does not take must stay as it is.

    Attributes:
        name: A class of `keras.optimizers` in small letters (`OPTIMIZERS`), or your own optimizer class as
            `package.module:Class`. It gets the learning rate and every argument that differs from its default here.
        weight_decay: 0 means none; likewise `clipnorm`, `clipvalue` and `global_clipnorm`, of which one may be set.
        weight_decay_exclude: Weights that do not decay: what their names contain, comma separated, as `bias,gamma,beta`.
        options: Arguments, by name, which the optimizer gets whatever its default is: those that are no fields here, and
            those whose default differs between optimizers, such as `options.rho` of `adadelta`. They count more than fields.
        use_ema: Keep and, after training, use an exponential moving average of the weights.
        gradient_accumulation_steps: Steps whose mean gradient makes one update; 0 means each step's own does.
    """

    name: str = "adam"
    momentum: float = 0.0
    nesterov: bool = False
    rho: float = 0.9
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False
    centered: bool = False
    weight_decay: float = 0.0
    clipnorm: float = 0.0
    clipvalue: float = 0.0
    global_clipnorm: float = 0.0
    use_ema: bool = False
    ema_momentum: float = 0.99
    gradient_accumulation_steps: int = 0
    weight_decay_exclude: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments to give to the optimizer: fields that differ from their defaults, and `options`."""
        kinds = {**OPTIMIZERS.get(self.name, {}), **EVERY_OPTIMIZER}
        found = {**self._changed(), **self.options}  # where Keras wants a float, it does not take 0
        return {
            name: float(value) if kinds.get(name) is float and type(value) is int and value in _FLOAT else value
            for name, value in found.items()
        }

    def _changed(self) -> dict[str, Any]:
        own = ("name", "options", "weight_decay_exclude")
        fields = [field for field in dataclasses.fields(self) if field.name not in own]
        return {field.name: value for field in fields if (value := getattr(self, field.name)) != field.default}

    def excluded_from_weight_decay(self) -> list[str]:
        """Returns what the names of weights contain that do not decay."""
        return [name for text in self.weight_decay_exclude.split(",") if (name := text.strip())]

    def option_fields(self) -> dict[str, dataclasses.Field[Any]]:
        """Returns a field for each argument that `options` may hold; none where only one's own optimizer knows."""
        takes = {**OPTIMIZERS[self.name], **EVERY_OPTIMIZER} if self.name in OPTIMIZERS else {}
        made = dataclasses.make_dataclass("Options", takes.items())
        return {field.name: field for field in dataclasses.fields(made)}

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the optimizer's name and arguments."""
        if ":" in self.name:
            faults: list[str] = []
            with collect_errors(faults):
                registry.check_findable("optimizer", self.name)
            yield from faults
            numbers = {name: value for name, value in self.arguments().items() if isinstance(value, float)}
            for name, value in numbers.items():
                yield from _FLOAT.faults(f"optimizer.{name}", value)
            return
        if self.name not in OPTIMIZERS:
            yield (
                f"Unknown optimizer {self.name!r}{did_you_mean(self.name, OPTIMIZERS)} "
                f"Expected one of {', '.join(sorted(OPTIMIZERS))}, or your own as 'package.module:Class'."
            )
            return
        if not all(isinstance(name, str) for name in self.options):
            yield f"optimizer.options must have texts as names. Received: {format_value(self.options)}."
            return
        takes = self.option_fields()
        arguments = self.arguments()
        for name in arguments:
            if name not in takes:
                known = f"It takes: {', '.join(takes)}."
                hint = did_you_mean(name, takes) if name in self.options else "."
                yield f"optimizer {self.name!r} takes no {name!r}{hint} {known}"
        wrong = [
            fault
            for name in self.options
            if name in takes
            for fault in option_faults(takes[name], self.options[name], f"optimizer.options.{name}")
        ]
        yield from wrong
        if wrong:
            return
        steps = arguments.pop("gradient_accumulation_steps", 0)
        if steps == 1 or steps not in _STEPS:
            yield f"optimizer.gradient_accumulation_steps must be 0 (off) or 2 to {MOST_STEPS}. Received: {format_value(steps)}."
        for name, value in arguments.items():
            where = f"optimizer.options.{name}" if name in self.options else f"optimizer.{name}"
            if name in takes and (allowed := range_of(self.name, name)):
                yield from allowed.faults(where, value)
        names = arguments.get("exclude_layers", [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
            yield f"optimizer.options.exclude_layers must be a list of texts. Received: {format_value(names)}."
        clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if arguments.get(name)]
        if len(clips) > 1:
            yield f"Only one of optimizer.clipnorm, clipvalue and global_clipnorm may be set. Received: {', '.join(clips)}."
        if self.excluded_from_weight_decay() and not arguments.get("weight_decay", self.name in _DECAYING):
            yield (
                f"optimizer.weight_decay_exclude is {self.weight_decay_exclude!r}, but no weight decays: set "
                "optimizer.weight_decay, or leave weight_decay_exclude empty."
            )


def range_of(optimizer: str, argument: str) -> Range | None:
    """Returns the range of an optimizer's argument, or None where it is no number or is checked otherwise."""
    return _RANGES_OF.get((optimizer, argument)) or _RANGES.get(argument)


def accumulation_fault(accumulated: int, steps: int) -> str:
    """Returns the error for an accumulation of gradients that is longer than the run, or an empty text.

    Args:
        accumulated: `gradient_accumulation_steps`.
        steps: Steps of the run.
    """
    if accumulated <= steps:
        return ""
    return (
        f"optimizer.gradient_accumulation_steps is {accumulated}, but the run has {steps} steps, so that no weight would be updated; "
        "accumulate fewer, or train longer."
    )
