"""Cases of the fuzz test: each integer seed draws a model, its data, and how it is trained.

Seeds below 1000 draw what they always drew; from 1000 on, `later_draws` adds to that; from 10000 on, `state_draws`, too; from 20000 on,
`call_draws`, too; from 30000 on, half of the cases split the optimizer's state; from 80000 on, half of them scale the loss; from 90000
on, `use_draws` gives most of them a step that uses its gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

FIRST_WITH_STATE, FIRST_WITH_CALLS, FIRST_WITH_SHARDS, FIRST_WITH_SCALES = 10_000, 20_000, 30_000, 80_000  # seeds
FIRST_WITH_USES = 90_000
CLASSES, TOKENS, WORDS = 3, 4, 7
SEQUENCES = ("tokens", "masked_tokens")
SEVERAL = ("outputs", "masked_outputs")  # outputs, "a" and "b"; a mask reaches the loss of "a"
ONLY_DENSE = (
    "dense",
    "wide",
    "embedding",
    "outputs",
    "added_vector",
    "added_mean",
    "added_sum",
    "regularized",
    "tokens",
)
MODELS = (*ONLY_DENSE, "conv", "norm", "masked_pooling", "masked_lstm", "masked_tokens", "masked_outputs")
REGRESSIONS = ("mse", "mae", "huber", "own")
NUMBERS = ("number", "total")  # functions that return the batch's mean or sum
CLASS_LOSSES = ("sparse", "categorical", "ignored")
IGNORED = 0  # a label
TALL = 3  # rows of an example of the model "tall"
MASKING = ("ignored", "own_mask")  # which set a mask on their own values
DECLARED = "declared"  # a function that returns `tfdist.total` of its sum
BATCH_LOSSES = ("number", "total", "counted", "hinge", "neighbours", "dice", "centre")  # must see the whole batch
NEW_LOSSES = (*MASKING, *BATCH_LOSSES, DECLARED)
PAIRS = "pairs"
COMPARING = ("softmax", PAIRS)  # which compare the examples of a batch; the former has a value for each example
ONE_NUMBER = (*BATCH_LOSSES, DECLARED, PAIRS)
NOISES = ("dropout", "tf.dropout", "tf.normal", "tf.uniform", "keras.normal", "keras.uniform")
# Untrained weights of a layer, by their aggregation.
AGGREGATED = {
    "sum": "sum",
    "sum_int": "sum",
    "mean": "mean",
    "first": "only_first_replica",
    "first_int": "only_first_replica",
}
SCALED = "scaled"  # no weight: the layer's output depends on the whole batch
GATHERED = ("queue", "top", "count")  # which are computed from the whole batch
ASSIGNED = (*AGGREGATED, *GATHERED, SCALED)
METRIC_FUNCTIONS = ("span", "product")  # which return one number for a batch
WEIGHTED_METRICS = ("heavy",)
ADDING_METRICS = (*METRIC_FUNCTIONS, "several")  # which add a number for each batch
COUNTERS = ("counted", "counted_rows")  # integers that begin at 1
BATCH_METRICS = (*ADDING_METRICS, *WEIGHTED_METRICS, "top", "last")
OWN = ("off", "own_rows")
READS = ("reads", "halves")
LOOPS = ("on_batch", "generator")
OVERRIDES = ("metrics", "metrics of an object", "loss", "loss of an object")
# What a step does with its gradients: clips, takes signs, logs their norm; or it moves weights by hand.
USES = ("global norm", "norm", "value", "sign", "logged norm", "sharp", "averages")
CLASS_WEIGHT = {0: 0.5, 1: 2.0, 2: 1.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how; `options` are the optimizer's."""

    seed: int
    model: str
    loss: str
    reduction: str | None
    optimizer: str
    options: dict[str, Any]
    replicas: int
    batch: int
    rows: int
    epochs: int
    steps_per_execution: int
    weights: str | None
    class_weight: dict[int, float] | None
    validation: tuple[int, int] | None  # rows, batch
    compression: str | None
    step: str
    jit: bool
    eager: bool
    dtype: str
    data: str
    pieces: tuple[int, ...] = ()  # a dataset function's batch sizes, over and over
    aggregation: str = ""  # of a loss's state
    noise: str = ""  # a random layer, which alone is judged
    pipelines: int = 1  # datasets that a function is asked for
    assigned: tuple[str, ...] = ()  # untrained weights of a layer
    hidden: bool = False  # whether that layer has hidden units, or the inputs
    batch_metrics: tuple[str, ...] = ()  # which are no mean over examples
    own: str = ""  # how each pipeline's own rows are given
    own_first: int = 0  # of which the first one has so many
    reads: str = ""  # whether a callback reads variables, and halves the learning rate
    override: str = ""  # a method of the model that is not Keras' own
    loop: str = ""  # what trains in place of one `fit`: calls on batches, or `epochs` fits on one generator
    fit_steps: int = 0  # of each of these fits
    evaluated_steps: int = 0  # of the evaluation after each of them, on the same generator
    shards: bool = False  # whether the optimizer's state is split
    scales: bool = False  # whether a `LossScaleOptimizer` is around the optimizer
    use: str = ""  # what the step does with its gradients

    @property
    def ids(self) -> bool:
        """Whether inputs are words."""
        return self.model in ("embedding", *SEQUENCES) or self.model.startswith("masked")

    def reduction_of(self, output: str) -> str | None:
        """Returns the reduction of an output's loss: sums stand beside a mean."""
        return "sum_over_batch_size" if output == "b" and self.reduction == "sum" else self.reduction

    def loss_of(self, output: str) -> str:
        """Returns the loss of an output: that of "b" has a value for each example."""
        return "mse" if output == "b" and self.loss in ONE_NUMBER else self.loss

    def pipeline_batches(self, pipeline: int) -> list[list[int]]:
        """Returns the rows of each batch that the dataset function gives a pipeline."""
        rows, found = list(range(pipeline, self.rows, self.pipelines)), []
        while rows:
            size = self.pieces[len(found) % len(self.pieces)]
            found.append(rows[:size])
            rows = rows[size:]
        return found

    def steps(self) -> list[list[int]]:
        """Returns the rows of each step of an epoch, those of the first replica first."""
        return [[row for part in parts for row in part] for parts in self.parts()]

    def parts(self) -> list[list[list[int]]]:
        """Returns the rows of each replica in each step of an epoch."""
        if not self.pieces:
            return self._dealt(self.rows, self.batch)
        each = [self.pipeline_batches(pipeline) for pipeline in range(self.pipelines)]
        taken = self.replicas // self.pipelines
        return [
            [part for batches in each for part in [*batches[first : first + taken], *([[]] * taken)][:taken]]
            for first in range(0, max(len(batches) for batches in each), taken)
        ]

    def validation_parts(self) -> list[list[list[int]]]:
        """Returns the rows of each replica in each step of a validation."""
        return self._dealt(*self.validation) if self.validation else []

    def passes(self) -> list[tuple[list[list[list[int]]], list[list[list[int]]]]]:
        """Returns what has logs of its own: the parts of each of its steps, and of each step of the validation after it."""
        if self.loop == "on_batch":
            return [([step], self.validation_parts()) for _ in range(self.epochs) for step in self.parts()]
        if self.loop == "generator":
            source = itertools.cycle(self.parts())
            taken = lambda steps: list(itertools.islice(source, steps))  # noqa: E731
            return [(taken(self.fit_steps), taken(self.evaluated_steps)) for _ in range(self.epochs)]
        return [(self.parts(), self.validation_parts())] * self.epochs

    def own_rows(self, rows: int) -> list[slice]:
        """Returns which of the rows each pipeline has, if they are their own."""
        if self.pipelines == 1:
            return [slice(0, rows)]
        first = self.own_first if rows == self.rows else max(1, rows * self.own_first // self.rows)
        return [slice(0, first), slice(first, rows)]

    def _dealt(self, rows: int, size: int) -> list[list[list[int]]]:
        batches = [list(range(first, min(first + size, rows))) for first in range(0, rows, size)]
        if not self.own or self.pipelines == 1:
            return [evenly(batch, self.replicas) for batch in batches]
        piece = -(-size // self.pipelines)
        each = []
        for part in self.own_rows(rows):
            whole = list(range(rows))[part]
            given = [whole[first : first + size] for first in range(0, len(whole), size)]
            if self.own == "own_rows":
                given = [whole]
            each.append([batch[first : first + piece] for batch in given for first in range(0, len(batch), piece)])
        return [list(step) for step in itertools.zip_longest(*each, fillvalue=[])]

    @property
    def sizes(self) -> list[int]:
        """The examples of each batch of an epoch and of its validation."""
        parts = [(self.rows, self.batch), *([self.validation] if self.validation else [])]
        return [min(batch, rows - first) for rows, batch in parts for first in range(0, rows, batch)]

    @property
    def starved(self) -> bool:
        """Whether TensorFlow's splitting by ceiling leaves a replica without examples."""
        return any(-(-size // self.replicas) * (self.replicas - 1) >= size > 0 for size in self.sizes)


def evenly(rows: list[int], parts: int) -> list[list[int]]:
    """Returns the rows in parts, of which the first may have one more than the last."""
    sizes = [(len(rows) + parts - 1 - part) // parts for part in range(parts)]
    ends = list(itertools.accumulate(sizes))
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def draw(seed: int) -> Case:
    """Returns the case of a seed."""
    from tests.fuzz import call_draws, later_draws, state_draws, use_draws

    case = draw_first(seed)
    if seed >= 1000:
        case = later_draws.draw_later(case)
    if seed >= FIRST_WITH_STATE:
        case = state_draws.draw_state(case)
    if seed >= FIRST_WITH_CALLS:
        case = call_draws.draw_calls(case)
    if seed >= FIRST_WITH_SHARDS:
        case = dataclasses.replace(case, shards=random.Random(f"{seed}, shards").random() < 0.5)
    if seed >= FIRST_WITH_SCALES:
        # A step of one's own that does not scale its loss would be wrong in plain Keras, too.
        is_possible = case.step != "own" and "loss_scale_factor" not in case.options
        case = dataclasses.replace(case, scales=is_possible and random.Random(f"{seed}, scales").random() < 0.5)
    if seed >= FIRST_WITH_USES:
        case = use_draws.draw_use(case)
    return case


def draw_first(seed: int) -> Case:
    """Returns what a seed draws of the features that the test began with."""
    rng = random.Random(seed)
    maybe = lambda chance: rng.random() < chance  # noqa: E731
    replicas = rng.choices([1, 2, 3, 4, 8], [4, 20, 10, 4, 1])[0]
    model = rng.choice(MODELS)
    compression = rng.choice([None, "bf16", "fp16", "int8", "topk", "powersgd"]) if maybe(0.25) else None
    if compression:
        model = rng.choice(["wide", "embedding", "regularized"])
    if replicas == 8:
        model, compression = rng.choice(["dense", "added_vector"]), None  # others take minutes to trace
    losses = [*REGRESSIONS, "number", "total", "binary", "categorical", "sparse"]
    if model in SEQUENCES:
        losses = ["mse", "huber", "own", "categorical", "sparse"]
    elif model in SEVERAL:
        losses = ["mse", "own", "binary"]
    loss = rng.choice(losses)
    reduction = "sum_over_batch_size"
    if maybe(0.25) and loss not in NUMBERS:
        reduction = rng.choice(["sum", "sum", "none", None, "mean_with_sample_weight"])
        if reduction in ("none", None) and model.startswith(("regularized", "added", "masked_outputs")):
            reduction = "sum"  # Keras adds vectors of one length, and no number to a vector
    optimizer = rng.choice(["SGD", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Nadam", "Lion", "Adamax"])
    if compression in ("bf16", "fp16", "int8"):
        optimizer = "SGD"  # others magnify what rounding leaves of small gradients
    if optimizer == "Lion" and loss in ("mae", "huber"):
        loss = "mse"  # of errors' signs the sum may be exactly 0, of which Lion takes the sign
    dtype = "float32" if compression in ("bf16", "fp16", "int8") or maybe(0.15) else "float64"
    if dtype == "float32":
        optimizer = "SGD"
    # The gradient of a vector is one of Keras' own step alone.
    step = rng.choice(["own", "scaled"]) if maybe(0.3) and reduction not in ("none", None) else "keras"
    options = draw_options(rng, optimizer, compression, replicas)
    if step == "own":
        options.pop("loss_scale_factor", None)
    weights = None if loss in NUMBERS or maybe(0.5) else rng.choice(["each", "zeros"])
    if weights and model in SEQUENCES:
        # Keras divides by the sum of the weights as they are given, not as they are spread over tokens.
        weights = "tokens" if reduction == "mean_with_sample_weight" else rng.choice(["tokens", "column"])
    if weights and model in SEVERAL and (model == "masked_outputs" or maybe(0.5)):
        weights = "outputs"
    weighs_classes = weights is None and loss in ("sparse", "categorical") and model not in SEQUENCES and maybe(0.5)
    batch = rng.randint(max(2, replicas), 3 * replicas + 6)
    rows = batch * rng.randint(1, 3) + (rng.randint(1, batch - 1) if maybe(0.7) else 0)
    validation = (rng.randint(1, 2 * batch), rng.randint(max(2, replicas), 2 * batch)) if maybe(0.5) else None
    epochs, steps_per_execution = rng.choice([1, 1, 1, 2, 2, 3]), rng.choice([1, 1, 1, 2, 3, 4])
    if replicas > 3:  # tracing takes minutes
        epochs, steps_per_execution = min(epochs, 2), min(steps_per_execution, 2 if replicas == 4 else 1)
    case = Case(
        seed=seed,
        model=model,
        loss=loss,
        reduction=reduction,
        optimizer=optimizer,
        options=options,
        replicas=replicas,
        batch=batch,
        rows=rows,
        epochs=epochs,
        steps_per_execution=steps_per_execution,
        weights=weights,
        class_weight=CLASS_WEIGHT if weighs_classes else None,
        validation=validation if replicas < 8 else None,
        compression=compression if replicas > 1 else None,
        step=step,
        jit=step == "keras" and replicas < 4 and maybe(0.06),
        eager=replicas < 4 and maybe(0.06),
        dtype=dtype,
        data=rng.choice(["arrays", "dataset"]),
    )
    return without_refused(case)


def draw_options(rng: random.Random, optimizer: str, compression: str | None, replicas: int) -> dict[str, Any]:
    """Returns the arguments of an optimizer, which float32 has exactly: Keras casts them to that in places."""
    options: dict[str, Any] = {"learning_rate": 2**-8 if optimizer == "Lion" else 2**-5}
    own = {
        "SGD": [{}, {"momentum": 0.875}, {"momentum": 0.75, "nesterov": True}, {"weight_decay": 0.125}],
        "Adam": [{}, {"amsgrad": True}],
        "AdamW": [{"weight_decay": 0.125}],
        "RMSprop": [{"rho": 0.875}, {"rho": 0.875, "centered": True}, {"rho": 0.875, "momentum": 0.75}],
        "Adagrad": [{"initial_accumulator_value": 0.125}],
    }
    options |= rng.choice(own.get(optimizer, [{}]))
    if optimizer in ("Adam", "AdamW", "Adamax", "Nadam", "Lion"):
        options |= {"beta_1": rng.choice([0.875, 0.75]), "beta_2": 1 - 2**-6}
    if rng.random() < 0.4 and compression not in ("bf16", "fp16", "int8"):
        options |= rng.choice([{"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}])
    if replicas == 8:
        return options
    if rng.random() < 0.25:
        options["gradient_accumulation_steps"] = rng.choice([2, 3])
    elif rng.random() < 0.15:
        options |= {"use_ema": True, "ema_momentum": 0.75, "ema_overwrite_frequency": rng.choice([None, 2])}
    if rng.random() < 0.15:
        options["loss_scale_factor"] = rng.choice([8.0, 3.0])
    return options


def without_refused(case: Case) -> Case:
    """Returns the case without what tfdist refuses."""
    sums_amid = case.model in ("masked_tokens", "masked_outputs", "norm") or case.reduction == "mean_with_sample_weight"
    sums_amid = sums_amid or case.loss == "total"
    return dataclasses.replace(case, jit=False) if case.replicas > 1 and (sums_amid or gathers(case)) else case


def gathers(case: Case) -> bool:
    """Whether metrics, weights or losses see the whole batch."""
    return case.loss in COMPARING or bool(case.batch_metrics) or bool({*case.assigned} & {*GATHERED, SCALED})
