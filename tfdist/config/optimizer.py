"""`OptimizerConfig`: the optimizer and its arguments. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tfdist.config import registry
from tfdist.config.constraints import MOST_STEPS, Constraint, between, option
from tfdist.config.options import NamedOptions
from tfdist.errors import ConfigError, collect_errors, did_you_mean

_ADAM: Mapping[str, Any] = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}

# Optimizer name to its arguments with Keras' defaults, without the learning rate and the arguments of every optimizer.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adadelta": {"rho": 0.95, "epsilon": 1e-7},
    "adafactor": {
        "beta_2_decay": -0.8,
        "epsilon_1": 1e-30,
        "epsilon_2": 1e-3,
        "clip_threshold": 1.0,
        "relative_step": True,
    },
    "adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7},
    "adam": {**_ADAM, "amsgrad": False},
    "adamax": _ADAM,
    "adamw": {**_ADAM, "amsgrad": False, "weight_decay": 0.004},
    "ftrl": {
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "beta": 0.0,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0,
    },
    "lamb": _ADAM,
    "lion": {"beta_1": 0.9, "beta_2": 0.99},
    "muon": {
        "adam_beta_1": 0.9,
        "adam_beta_2": 0.999,
        "adam_weight_decay": 0.004,
        "epsilon": 1e-7,
        "momentum": 0.95,
        "rms_rate": 0.2,
        "muon_a": 3.4445,
        "muon_b": -4.775,
        "muon_c": 2.0315,
        "adam_lr_ratio": 1.0,
        "exclude_layers": (),
        "exclude_embeddings": True,
        "ns_steps": 5,
        "nesterov": True,
        "weight_decay": 0.004,
    },
    "nadam": _ADAM,
    "rmsprop": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
    "schedulefreeadamw": {**_ADAM, "epsilon": 1e-8, "warmup_steps": 0},
    "sgd": {"momentum": 0.0, "nesterov": False},
}
# The arguments of every optimizer. 0, or 1 for the loss scale, stands for Keras' None.
EVERY_OPTIMIZER: Mapping[str, Any] = {
    **dict.fromkeys(("weight_decay", "clipnorm", "clipvalue", "global_clipnorm"), 0.0),
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": 0,
    "gradient_accumulation_steps": 0,
    "loss_scale_factor": 1.0,
}
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_OFF_AT_ZERO = (*_CLIPS, "ema_overwrite_frequency", "gradient_accumulation_steps")
_EXCLUDE = "weight_decay_exclude"  # not an argument of Keras


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


# Keras computes in float32: a share closer to 1 would round to 1, a smaller number to 0, and a larger one would overflow.
_BELOW_1 = 0.9999999
_ABOVE_0 = 1e-30
_MOST_AMOUNT = 1e6
_SHARE = between(0, _BELOW_1)
_POSITIVE = between(_ABOVE_0, 1e3)
_AMOUNT = between(0, _MOST_AMOUNT)
_CLIP = between(0, 1e30, off=True)
_STEPS = between(0, MOST_STEPS, off=True)

# The constraint of each argument for all optimizers; `_CONSTRAINTS_OF` has those of one optimizer.
_CONSTRAINTS: Mapping[str, Constraint] = {
    **dict.fromkeys(("momentum", "rho", "beta_1", "beta_2", "adam_beta_1", "adam_beta_2", "ema_momentum"), _SHARE),
    **dict.fromkeys(("epsilon", "epsilon_1", "epsilon_2", "rms_rate"), _POSITIVE),
    **dict.fromkeys(
        ("weight_decay", "adam_weight_decay", "adam_lr_ratio", "initial_accumulator_value", "beta"), _AMOUNT
    ),
    **dict.fromkeys(("l1_regularization_strength", "l2_regularization_strength"), _AMOUNT),
    "l2_shrinkage_regularization_strength": _AMOUNT,
    **dict.fromkeys(_CLIPS, _CLIP),
    "clip_threshold": between(1e-6, 1e30),
    "loss_scale_factor": between(1e-6, 1e15),
    **dict.fromkeys(("warmup_steps", "ema_overwrite_frequency"), _STEPS),
    "gradient_accumulation_steps": (
        f"0 (off) or 2 to {MOST_STEPS}",
        lambda steps: steps == 0 or 2 <= steps <= MOST_STEPS,
    ),
    "beta_2_decay": between(-10, 0),
    "learning_rate_power": between(-10, 0),
    **dict.fromkeys(("muon_a", "muon_b", "muon_c"), between(-10, 10)),
    "ns_steps": between(1, 1000),
    "exclude_layers": ("a list of texts", _are_texts),
}
# Constraints for one optimizer, without 0: there Keras raises an error or computes NaN.
_CONSTRAINTS_OF: Mapping[tuple[str, str], Constraint] = {
    **dict.fromkeys((("lion", "beta_1"), ("schedulefreeadamw", "beta_1")), between(1e-7, _BELOW_1)),
    ("ftrl", "initial_accumulator_value"): between(_ABOVE_0, _MOST_AMOUNT),
}


@dataclasses.dataclass(init=False, repr=False, eq=False)
class OptimizerConfig(NamedOptions):
    """A Keras optimizer's name and arguments, by Keras' names, as `OptimizerConfig("sgd", momentum=0.9)`.

    The optimizer gets the learning rate and the arguments that are set. Arguments of a custom optimizer are checked only when it is created.

    Attributes:
        name: A class of `keras.optimizers` in small letters (`OPTIMIZERS`), or your own optimizer class or function as
            `package.module:Class`.
        weight_decay: 0 means no weight decay.
        weight_decay_exclude: Parts of the names of weights that do not decay, comma separated: `bias,gamma,beta`.
        clipnorm: 0 means no clipping. At most one of `clipnorm`, `clipvalue` and `global_clipnorm` may be set.
        use_ema: Keep and, after training, use an exponential moving average of the weights.
        gradient_accumulation_steps: Number of steps whose mean gradient makes one update; 0 means one update per step.

    Examples:
        >>> from tfdist.config import OptimizerConfig
        >>> OptimizerConfig("sgd", momentum=0.9).momentum
        0.9
    """

    WHAT: ClassVar = "optimizer"
    BUILT_IN: ClassVar = OPTIMIZERS

    name: str = "adam"

    @property
    def takes_any(self) -> bool:
        """True for a custom optimizer, which is imported later, with TensorFlow."""
        return ":" in self.name

    def option_fields(self) -> Mapping[str, dataclasses.Field[Any]]:
        """Returns the optimizer's arguments, by name; for a custom one, only the arguments of every optimizer.

        Raises:
            ConfigError: The optimizer does not exist.
        """
        if self.name not in OPTIMIZERS and not self.takes_any:
            raise ConfigError(
                f"Unknown optimizer {self.name!r}{did_you_mean(self.name, OPTIMIZERS)} "
                f"Expected one of {', '.join(sorted(OPTIMIZERS))}, or your own as 'package.module:Class'."
            )
        return _fields(self.name)

    def arguments(self) -> dict[str, Any]:
        """Returns the optimizer's arguments: those that are set, except values of 0 that turn an option off."""
        arguments = self.options()
        arguments.pop(_EXCLUDE, None)
        # Where weights decay by default, and in a custom optimizer, a weight decay of 0 turns it off.
        off: tuple[str, ...] = _OFF_AT_ZERO
        if not self.takes_any and not self.decays:
            off += ("weight_decay",)
        return {name: value for name, value in arguments.items() if name not in off or value != 0}

    @property
    def decays(self) -> bool:
        """True if weights decay by default."""
        return "weight_decay" in OPTIMIZERS.get(self.name, ())

    def excluded_from_weight_decay(self) -> list[str]:
        """Returns the parts of names that exclude a weight from weight decay."""
        return list(filter(None, map(str.strip, self.weight_decay_exclude.split(","))))

    def faults(self) -> Iterator[str]:
        """Yields the errors in the optimizer's name, and in arguments that do not go together."""
        faults: list[str] = []
        with collect_errors(faults):
            if self.takes_any:
                registry.check_findable("optimizer", self.name)
            self.option_fields()
        if self.takes_any:
            for name, value in self.options().items():
                if isinstance(value, float) and name not in EVERY_OPTIMIZER and not math.isfinite(value):
                    faults.append(f"optimizer.{name} must be a finite number. Received: {value}.")
        yield from faults
        if faults:
            return
        arguments = self.arguments()
        clips = [name for name in _CLIPS if name in arguments]
        if len(clips) > 1:
            yield f"Only one of optimizer.clipnorm, clipvalue and global_clipnorm may be set. Received: {', '.join(clips)}."
        if self.excluded_from_weight_decay() and not arguments.get("weight_decay", self.decays):
            yield (
                f"optimizer.weight_decay_exclude is {self.weight_decay_exclude!r}, but no weight decays: set "
                "optimizer.weight_decay, or leave weight_decay_exclude empty."
            )


@functools.cache
def _fields(optimizer: str) -> Mapping[str, dataclasses.Field[Any]]:
    """Returns a field for each argument of an optimizer. Keras' arguments of a custom one have types, but neither defaults nor checks."""
    all_arguments = {name: default for takes in OPTIMIZERS.values() for name, default in takes.items()}
    own = OPTIMIZERS.get(optimizer, {})
    # The optimizer's own arguments come first, with its own defaults of the common ones.
    defaults = {**(own or all_arguments), **EVERY_OPTIMIZER, **own, _EXCLUDE: ""}
    fields = {}
    for name, default in defaults.items():
        field = dataclasses.field()
        if own or name in EVERY_OPTIMIZER or name == _EXCLUDE:
            constraint = _CONSTRAINTS_OF.get((optimizer, name), _CONSTRAINTS.get(name))
            field = option(default, *(constraint or ()))
        fields[name] = (name, _kind(default), field)
    options = dataclasses.make_dataclass("Options", fields.values(), kw_only=True)
    return {field.name: field for field in dataclasses.fields(options)}


def _kind(default: Any) -> Any:
    return tuple[str, ...] if isinstance(default, tuple) else type(default)


def accumulation_fault(accumulated: int, steps: int) -> str:
    """Returns the error for an accumulation of gradients that is longer than the run, of `steps` steps, or an empty text."""
    if accumulated <= steps:
        return ""
    return (
        f"optimizer.gradient_accumulation_steps is {accumulated}, but the run has {steps} steps, so that no weight would be updated; "
        "accumulate fewer, or train longer."
    )
