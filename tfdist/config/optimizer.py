"""`OptimizerConfig`: the optimizer and its arguments. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import did_you_mean

# Optimizer name to the arguments it takes besides the learning rate and those of every optimizer.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "rmsprop": ("rho", "momentum", "epsilon", "centered"),
    "adagrad": ("epsilon",),
    "adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "adamw": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "nadam": ("beta_1", "beta_2", "epsilon"),
    "lion": ("beta_1", "beta_2"),
}


# Least, what it is below, and the most that is allowed beside, of optimizers' arguments.
_RANGES: Mapping[str, tuple[float, float, float | None]] = {
    "momentum": (0, 1, 1),
    "rho": (0, 1, 1),
    "beta_1": (0, 1, None),
    "beta_2": (0, 1, None),
    "ema_momentum": (0, 1, 1),
    "epsilon": (0, float("inf"), None),
    "weight_decay": (0, float("inf"), None),
    "clipnorm": (0, float("inf"), None),
    "clipvalue": (0, float("inf"), None),
    "global_clipnorm": (0, float("inf"), None),
}


_EVERY_OPTIMIZER = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "gradient_accumulation_steps",
)


@dataclasses.dataclass
class OptimizerConfig:
    """A Keras optimizer's name and arguments, by Keras' names; what the optimizer does not take must stay as it is.

    Attributes:
        name: One of `OPTIMIZERS`, or your own optimizer class as `package.module:Class`, which gets the learning rate
            and every argument that differs from its default here.
        weight_decay: 0 means none; likewise `clipnorm`, `clipvalue` and `global_clipnorm`, of which one may be set.
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

    def non_default_arguments(self) -> dict[str, Any]:
        """Returns the arguments that differ from their defaults: those to give to the optimizer."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name != "name" and (value := getattr(self, field.name)) != field.default
        }

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the optimizer's name and arguments."""
        if ":" in self.name:
            return
        if self.name not in OPTIMIZERS:
            yield (
                f"Unknown optimizer {self.name!r}{did_you_mean(self.name, OPTIMIZERS)} "
                f"Expected one of {', '.join(sorted(OPTIMIZERS))}, or your own as 'package.module:Class'."
            )
            return
        if self.gradient_accumulation_steps < 0 or self.gradient_accumulation_steps == 1:
            yield (
                "optimizer.gradient_accumulation_steps must be 0 (off) or 2 or more. "
                f"Received: {self.gradient_accumulation_steps}."
            )
        for name, (least, below, most) in _RANGES.items():
            value = getattr(self, name)
            if not (least <= value < below or value == most):
                limit = f"{least:g} to {most:g}" if most is not None else f"{least:g} or more, and less than {below:g}"
                yield f"optimizer.{name} must be {limit}. Received: {value}."
        takes = OPTIMIZERS[self.name]
        for name in self.non_default_arguments():
            if name not in takes and name not in _EVERY_OPTIMIZER:
                yield f"optimizer {self.name!r} takes no {name!r}. It takes: {', '.join((*takes, *_EVERY_OPTIMIZER))}."
        clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, name)]
        if len(clips) > 1:
            yield f"Only one of optimizer.clipnorm, clipvalue and global_clipnorm may be set. Received: {', '.join(clips)}."
