"""Compressors, on several ranks of one process: what they promise, on awkward numbers too."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiers
from tfdist import ConfigError, compression
from tfdist.collectives.communicator import ByteCounter, InProcessCommunicator
from tfdist.compression.base import NONE, BucketedReduction
from tfdist.compression.buckets import assign_buckets
from tfdist.compression.cast import BF16, FP16
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.int8 import Int8
from tfdist.compression.per_variable import PerVariable
from tfdist.compression.powersgd import PowerSGD
from tfdist.compression.topk import TopK
from tfdist.compression.warmup import Warmup
from tfdist.config import CompressionConfig

SHAPES = [(37, 29), (29,), (3, 3, 16, 9), (5, 7), (2000, 1)]  # odd tails, and two that are not worth it
BIG = [0, 2, 4]

ALL = {
    "none": NONE,
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "int8_sum": Int8(transport="sum"),
    "int8_feedback": ErrorFeedback(Int8(block=64)),
    "powersgd": PowerSGD(2),
    "powersgd_cold": PowerSGD(2, warm_start=False),
    "powersgd_feedback": ErrorFeedback(PowerSGD(2)),
    "topk": TopK(0.05),
    "topk_feedback": ErrorFeedback(TopK(0.05, "exact")),
    "topk_sampled": ErrorFeedback(TopK(0.05, samples=100)),
    "warmup": Warmup(ErrorFeedback(PowerSGD(2)), 2),
    "rules": PerVariable({"^0": ErrorFeedback(TopK()), "^2": None}, ErrorFeedback(Int8())),
}
BUCKET_BYTES = 4000  # so that some of SHAPES are cut
# A codec in a wrapper that others have, too; of what is not in these, each codec and each wrapper is there once.
COMBINED = ["powersgd_feedback", "topk_feedback"]
# Between processes each of these goes the way of another one: bf16, powersgd, warmup, topk_sampled.
SIMILAR = ["fp16", "powersgd_cold", *COMBINED]
FEEDBACK = ["int8_feedback", "powersgd_feedback", "topk_feedback", "topk_sampled", "warmup"]
RANKS = tiers.cases([1, 2, 3], quick=[2])
DENORMAL = 1e-70  # the squares of what may count as zero


def normal(rng, shape):
    return rng.standard_normal(shape)


INPUTS = {
    "normal": normal,
    "heavy_tails": lambda rng, shape: rng.standard_t(1.5, shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "constants": lambda rng, shape: np.full(shape, 0.3),
    "ties": lambda rng, shape: rng.integers(-1, 2, shape),
    "denormals": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-30,
    "rows_of_zeros": lambda rng, shape: (
        rng.standard_normal(shape) * (np.arange(shape[0]) % 3 == 0).reshape(-1, *[1] * (len(shape) - 1))
    ),
}


class Run:
    """Ranks that exchange gradients, step by step."""

    def __init__(self, compressor, ranks, shapes=SHAPES, bucket_bytes=BUCKET_BYTES):
        self.shapes = shapes
        self.bucket_bytes = bucket_bytes
        self.group = InProcessCommunicator(ranks)
        self.layout = BucketedReduction(compressor, [(str(number), shape) for number, shape in enumerate(shapes)])
        initial = [tuple(s.initial(s.shape, number) for s in slots) for number, slots in enumerate(self.layout.slots)]
        self._initial = [initial for _ in range(ranks)]
        self._function = tf.function(self._exchange, autograph=False)
        self.start()

    def start(self):
        """Begins anew."""
        self.states, self.steps = self._initial, 0

    def _exchange(self, values, states, step):
        return self.layout.run(self.group, values, states, self.group.contexts(step), bucket_bytes=self.bucket_bytes)

    def step(self, values):
        """Returns each rank's `Reduced`, of a list of values for each rank."""
        values = [[tf.constant(value, tf.float32) for value in mine] for mine in values]
        results = self._function(values, self.states, tf.constant(self.steps, tf.int64))
        self.steps += 1
        self.states = [result.states for result in results]
        return results

    def random_step(self, rng, kind=normal):
        values = [[kind(rng, shape).astype(np.float32) for shape in self.shapes] for _ in self.group.ranks]
        return values, self.step(values)


@functools.cache
def run_of(name, ranks):
    """Returns the run of a compressor of `ALL`, which is traced once for all tests, at its beginning."""
    return Run(ALL[name], ranks)


def exact(values):
    return [np.sum([np.asarray(mine[number], np.float64) for mine in values], 0) for number in range(len(values[0]))]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", tiers.cases(ALL, quick=set(ALL) - {*COMBINED, "int8_feedback", "powersgd_cold"}))
def test_all_ranks_have_the_same_finite_sums(name, ranks):
    run = run_of(name, ranks)
    for kind, make in INPUTS.items():
        run.start()
        rng = np.random.default_rng(0)
        for _ in range(3):
            values, results = run.random_step(rng, make)
            for number, expected in enumerate(exact(values)):
                for result in results:
                    np.testing.assert_array_equal(result.sums[number], results[0].sums[number], kind)
                total = results[0].sums[number].numpy()
                assert total.shape == expected.shape and np.isfinite(total).all(), kind
                if number not in BIG:
                    bound = 1e-6 * max(1e-30, np.abs(expected).max())
                    np.testing.assert_allclose(total, expected, rtol=0, atol=bound, err_msg=kind)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", tiers.cases(FEEDBACK, quick=set(FEEDBACK) - set(COMBINED)))
def test_nothing_is_lost_with_error_feedback(name, ranks):
    run = run_of(name, ranks)
    for kind, make in INPUTS.items():
        run.start()
        rng = np.random.default_rng(1)
        gradients = [np.zeros(shape) for shape in SHAPES]
        totals = [np.zeros(shape) for shape in SHAPES]
        for _ in range(10):
            values, results = run.random_step(rng, make)
            for number in range(len(SHAPES)):
                gradients[number] += exact(values)[number]
                totals[number] += results[0].sums[number].numpy()
                residual = sum(state[number][0].numpy() for state in run.states) if run.layout.slots[number] else 0
                bound = max(2e-5 * np.abs(gradients[number]).max(), 1e-37)
                np.testing.assert_allclose(
                    totals[number] + residual, gradients[number], rtol=0, atol=bound, err_msg=kind
                )


@pytest.mark.parametrize("ranks", tiers.cases([2, 3], quick=[2]))
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "int8_sum"])
def test_what_rounds_stays_within_half_a_level(name, ranks):
    levels = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127, "int8_sum": 0.5 / (127 // ranks)}[name]
    run = run_of(name, ranks)
    for kind, make in INPUTS.items():
        run.start()
        values, results = run.random_step(np.random.default_rng(2), make)
        # Each rank's rounding and those of sums; float16 of less than 6e-5 has fewer digits.
        largest = sum(max(np.abs(mine[number]).max() for number in BIG) for mine in values)
        for number in BIG:
            error = np.abs(results[0].sums[number] - exact(values)[number]).max()
            assert error <= 3 * levels * largest + (3 * 2.0**-24 if name == "fp16" else 1e-36), kind


@pytest.mark.parametrize(
    "name",
    tiers.cases(
        ["topk", "topk_feedback", "topk_sampled", "powersgd", "powersgd_cold"],
        quick=["topk_feedback", "topk_sampled", "powersgd"],
    ),
)
def test_what_leaves_out_contracts(name):
    run = run_of(name, 1)
    for kind, make in INPUTS.items():
        run.start()
        values, results = run.random_step(np.random.default_rng(3), make)
        for number in BIG:
            value = np.asarray(values[0][number], np.float64)
            total = np.asarray(results[0].sums[number], np.float64)
            left, size = ((value - total) ** 2).sum(), (value**2).sum()
            assert left <= size * (1 + 1e-5) + DENORMAL, kind
            if name == "topk_feedback":
                k = int(np.ceil(0.05 * value.size))
                assert left <= size * (1 - k / value.size) * (1 + 1e-5) + DENORMAL, kind
                largest = np.sort(np.abs(value).ravel())[-k:]
                np.testing.assert_allclose((total**2).sum(), (largest**2).sum(), rtol=1e-5, atol=DENORMAL)


def test_sampled_thresholds_find_about_as_many_and_never_more():
    shape = (300, 200)
    run, rng = Run(TopK(0.01, samples=2000), 1, [shape]), np.random.default_rng(4)
    for _ in range(5):
        _, results = run.random_step(rng)
        found = np.count_nonzero(results[0].sums[0])
        assert 300 < found <= 600


def test_of_too_many_equal_numbers_other_ones_are_sent_at_each_step():
    run = Run(TopK(0.05, samples=100), 1, [(100, 100)])
    sent = sum(np.asarray(run.step([[np.ones((100, 100))]])[0].sums[0]) for _ in range(20))
    assert sent.min() == sent.max() == 1


@pytest.mark.parametrize("kind", tiers.cases(["normal", "ties", "zeros", "heavy_tails"], quick=["ties"]))
def test_topk_adds_one_rank_after_another_with_and_without_a_gpu(kind, monkeypatch):
    """A GPU adds what meets at a place in any order, and ranks would drift apart."""
    found = []
    for devices in ([], ["GPU:0"]):
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda _, devices=devices: devices)
        run, rng = Run(ErrorFeedback(TopK(0.3, samples=100)), 3, [(37, 29)]), np.random.default_rng(7)
        steps = [run.random_step(rng, INPUTS[kind])[1] for _ in range(3)]
        found.append([np.array(each) for each in tf.nest.flatten([(r.sums, r.states) for r in steps[-1]])])
    for alone, with_gpu in zip(*found, strict=True):
        np.testing.assert_array_equal(alone, with_gpu)


@pytest.mark.parametrize(
    "name",
    tiers.cases(["int8_feedback", "powersgd_feedback", "topk_feedback", "topk_sampled"], quick=["powersgd_feedback"]),
)
def test_errors_that_are_fed_back_do_not_grow(name):
    run, rng = Run(ALL[name], 2, [(37, 29)]), np.random.default_rng(5)
    norms = []
    for _ in range(800):  # as the errors of the first 100 steps grow
        run.random_step(rng)
        norms.append(np.linalg.norm(run.states[0][0][0]))
    assert np.mean(norms[600:]) < 1.2 * np.mean(norms[200:400])


def test_a_matrix_of_low_rank_comes_through():
    rng = np.random.default_rng(6)
    left, right = rng.standard_normal((40, 2)), rng.standard_normal((2, 30))
    run = Run(PowerSGD(2), 2, [(40, 30)])
    values = [[left * scale @ right] for scale in (1.0, 2.0)]
    for _ in range(3):
        results = run.step(values)
    np.testing.assert_allclose(results[0].sums[0], exact(values)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["rank 1", pytest.param("decaying", marks=pytest.mark.full)])
@pytest.mark.parametrize("shape", [(64, 64), (4096, 64)])
def test_what_has_less_than_its_rank_comes_through(kind, shape):
    """Of columns that depend on each other Gram-Schmidt leaves rounding errors, which are not to be made columns of length 1."""
    rng = np.random.default_rng(9)
    left, right = (np.linalg.qr(rng.standard_normal((size, 16)))[0] for size in shape)
    sizes = np.eye(16)[0] if kind == "rank 1" else 0.05 ** np.arange(16)
    matrix = left * sizes @ right.T
    run = Run(PowerSGD(4), 2, [shape])
    for _ in range(8):
        results = run.step([[matrix], [matrix]])
        assert np.linalg.norm(results[0].sums[0] / 2 - matrix) < 5e-4


def test_warm_start_follows_what_stays():
    rng = np.random.default_rng(10)
    left, right = (np.linalg.qr(rng.standard_normal((size, 30)))[0] for size in (80, 60))
    sizes = 0.8 ** np.arange(30)
    matrix, best = left * sizes @ right.T, np.linalg.norm(sizes[2:])
    errors = {}
    for warm in (True, False):
        run = Run(PowerSGD(2, warm_start=warm), 1, [(80, 60)])
        for _ in range(30):
            results = run.step([[matrix]])
        errors[warm] = np.linalg.norm(results[0].sums[0] - matrix)
    assert errors[True] < 1.01 * best and errors[False] > 1.03 * best


def test_sixteen_bits_hold_the_sum_of_what_they_hold():
    run = Run(FP16(), 3, [(40, 30)])
    results = run.step([[np.full((40, 30), 60000.0)]] * 3)
    np.testing.assert_allclose(results[0].sums[0], 180000, rtol=1e-3)


def test_powersgd_recovers_from_gradients_of_zeros():
    run, rng = Run(PowerSGD(2), 2, [(40, 30)]), np.random.default_rng(7)
    run.step([[np.zeros((40, 30))]] * 2)
    _, results = run.random_step(rng)
    assert np.linalg.norm(results[0].sums[0]) > 1


def test_warmup_is_exact_and_then_is_not():
    run, rng = Run(Warmup(PowerSGD(1), 2), 2, [(40, 30)]), np.random.default_rng(8)
    errors = []
    for _ in range(4):
        values, results = run.random_step(rng)
        errors.append(np.abs(results[0].sums[0] - exact(values)[0]).max())
    assert max(errors[:2]) < 1e-5 and min(errors[2:]) > 0.1


def test_rules_choose_by_name():
    layout = BucketedReduction(
        ALL["rules"], [("0/kernel", (4, 4)), ("2", (100, 100)), ("3", (100, 100)), ("4", (100,))]
    )
    assert [c.description for c in layout.compressors] == [
        "ErrorFeedback(TopK())",
        "NoCompression()",
        "ErrorFeedback(Int8())",
        "NoCompression()",
    ]


def test_a_variable_without_gradient_keeps_its_state():
    layout = BucketedReduction(ErrorFeedback(Int8()), [(str(n), (40, 30)) for n in range(3)])
    group, values = InProcessCommunicator(2), [tf.random.stateless_normal((40, 30), [1, n]) for n in range(2)]
    states = [(tf.zeros((40, 30)),)] * 2
    members = group.contexts(tf.constant(0, tf.int64))
    results = group.run([layout.exchange(values, states, member, variables=[0, 2]) for member in members])
    alone = group.run([ErrorFeedback(Int8()).exchange(values, states, member) for member in members])
    for mine, other in zip(results[0].sums, alone[0].sums, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_counts_bytes(ranks):
    shapes = [(1000, 1000), (1000,)]
    ring, gather = 2 * (ranks - 1) / ranks, ranks - 1
    plain = ring * 4 * (10**6 + 10**3)
    assert NONE.bytes_per_step(shapes, ranks) == round(plain)
    assert BF16().bytes_per_step(shapes, ranks) == round(ring * (2 * 10**6 + 4000))
    blocks = -(-(10**6) // (256 * ranks)) * ranks
    assert Int8().bytes_per_step(shapes, ranks) == round(ring * blocks * 260 + ring * 4000)
    assert PowerSGD(4).bytes_per_step(shapes, ranks) == round(ring * 4 * (2 * 4 * 1000 + 1000))
    assert TopK(0.01).bytes_per_step(shapes, ranks) == round(gather * 8 * 10**4 + ring * 4000)
    assert Warmup(TopK(0.01), 10).bytes_per_step(shapes, ranks) == TopK(0.01).bytes_per_step(shapes, ranks)
    assert NONE.bytes_per_step(shapes, 1) == 0


@pytest.mark.parametrize(
    "rows", [BF16().row_codec, FP16().row_codec, Int8().row_codec, ErrorFeedback(Int8()).row_codec, NONE.row_codec]
)
@pytest.mark.parametrize("width", [1, 5, 8])
def test_rows_come_back(rows, width):
    values = tf.random.stateless_normal([6, width], [1, 2])
    back = rows.unpack(rows.pack(values), width)
    np.testing.assert_allclose(back, values, atol=0.5 / 127 * np.abs(values).max() + 1e-6)


# Names and arguments


def test_arguments_reach_their_compressor():
    config = CompressionConfig("powersgd", matrix_approximation_rank=1, start_powerSGD_iter=7)
    assert (
        compression.create(config).description
        == "Warmup(ErrorFeedback(PowerSGD(matrix_approximation_rank=1)), steps=7)"
    )
    assert compression.create(config).bytes_per_step([(1000, 1000)], 2) == 4 * 2000
    assert compression.create(CompressionConfig("topk", use_error_feedback=False)).description == "TopK()"
    assert (
        compression.create(CompressionConfig("topk", warmup_steps=3)).description
        == "Warmup(ErrorFeedback(TopK()), steps=3)"
    )
    made = Int8()
    assert compression.create(made) is made and compression.create(None) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("topkk", "Unknown compression 'topkk'.*topk"),
        (CompressionConfig("int8", block=6), r"power of two, 4 to 2\*\*30. Received: 6"),
        (
            CompressionConfig("int8", transport="one"),
            "compression.transport must be one of: two_shot, sum. Received: 'one'",
        ),
        (CompressionConfig("topk", compress_ratio=0.0), "compress_ratio must be more than 0, and at most 1"),
        (CompressionConfig("powersgd", matrix_approximation_rank=0), "rank must be 1 to 2147483647"),
        (
            CompressionConfig("bf16", block=64),
            "'bf16' takes no 'block', which is an option of int8. It takes no arguments",
        ),
        (CompressionConfig("int8", block="8"), "compression.block must be int. Received: '8'"),
        (CompressionConfig("powersgd", matrix_approximation_rank=1.5), "rank must be int. Received: 1.5"),
        (CompressionConfig("int8", block=2), r"compression.block must be a power of two.*2\."),
        (
            CompressionConfig("int8", blok=8),
            "'int8' takes no 'blok'; did you mean 'block'. It takes: block",
        ),
        (CompressionConfig("int8", options={"block": 8}), "'int8' takes no 'options'"),
        (3, "compression must be a name, a CompressionConfig"),
    ],
)
def test_wrong_names_and_arguments_are_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        compression.create(asked)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(selection="exactt"), "TopK: selection must be one of: sampled, exact. Received: 'exactt'"),
        (lambda: TopK(5.0), "TopK: compress_ratio must be more than 0, and at most 1"),
        (lambda: Int8(6), "Int8: block must be a power of two"),
        (lambda: Int8(transport="summ"), "Int8: transport must be one of: two_shot, sum"),
        (lambda: PowerSGD(0), "PowerSGD: matrix_approximation_rank must be 1 to 2147483647"),
        (lambda: Warmup(Int8(), -3), "Warmup: steps must be 0 or more"),
        (lambda: Warmup("int8", 3), "Warmup goes around a compressor.* Received: 'int8'"),
        (lambda: ErrorFeedback(ALL["rules"]), "ErrorFeedback goes around a compressor, and inside of PerVariable"),
        (lambda: PerVariable({"kernel": "bf16"}), "'kernel' must have a compressor or None. Received: 'bf16'"),
        (lambda: PerVariable({"(": None}), r"'\(' is no regular expression"),
    ],
)
def test_compressors_refuse_the_same(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_sum_of_few_bits_is_for_few_ranks():
    with pytest.raises(ConfigError, match=r"for 127 ranks at most\. Received: 200; use 'two_shot'"):
        Int8(transport="sum").bytes_per_step([(100, 100)], 200)


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 4, 4], 0, [[2, 1, 0]]),
        ([4, 4, 4], 1, [[2], [1], [0]]),
        ([1, 100, 1, 1], 8, [[3, 2], [1], [0]]),
        ([8, 0], 8, [[1, 0]]),
        ([], 8, []),
    ],
)
def test_buckets_begin_with_the_last_gradient(sizes, most, expected):
    assert assign_buckets(sizes, most) == expected


def lanes_of(compressor, shapes, bucket_bytes):
    """Returns the bytes that are sent in each bucket, as planned for two ranks."""
    lanes = {}

    class Recording(ByteCounter):
        def run(self, exchanges, lane=0):
            before = self.sent
            results = super().run(exchanges, lane)
            lanes[lane] = self.sent - before  # with an inner one's, of a choice
            return results

    layout, group = BucketedReduction(compressor, [("", shape) for shape in shapes]), Recording(2)
    values = [tf.ones(shape) for shape in shapes]
    states = [tuple(tf.zeros(slot.shape) for slot in slots) for slots in layout.slots]
    layout.run(group, [values], [states], group.contexts(tf.constant(0, tf.int64)), bucket_bytes=bucket_bytes)
    return list(lanes.values())


def test_buckets_have_so_many_bytes():
    shapes = [(100, 100)] * 4  # 40 kB each
    for compressor in (NONE, BF16(), Int8()):
        assert [len(lanes_of(compressor, shapes, size)) for size in (0, 40_000, 80_000, 160_000)] == [1, 4, 2, 1]
    whole = PowerSGD(2), TopK(0.05)  # of what they send
    assert [len(lanes_of(compressor, shapes, 40_000)) for compressor in whole] == [1, 1]


def test_large_gradients_are_cut_where_numbers_need_not_be_together():
    shapes = [(100, 100), (10_000, 100)]  # 40 kB and 4 MB
    assert [len(lanes_of(each, shapes, 10**6)) for each in (NONE, TopK(0.01), PowerSGD(2))] == [2, 1, 1]
    for compressor in (BF16(), ErrorFeedback(BF16()), Warmup(BF16(), 2)):
        assert lanes_of(compressor, shapes, 10**6) == [500_000] * 4 + [20_000]
    *parts, rest = lanes_of(Int8(), shapes, 10**6)
    assert len(parts) == 4 and sum(parts) + rest == pytest.approx(Int8().bytes_per_step(shapes, 2), rel=1e-3)
    assert max(parts) == pytest.approx(min(parts), rel=0.01)


@pytest.mark.parametrize(
    "compressor",
    tiers.cases(
        [BF16(), FP16(), ErrorFeedback(BF16()), Int8(block=64), Int8(transport="sum")],
        quick=[ErrorFeedback(BF16()), Int8(block=64)],
    ),
    ids=lambda c: c.description,
)
def test_cuts_change_no_bit(compressor):
    cut, whole = (Run(compressor, 2, [(37, 29), (29,), (2000, 1)], size) for size in (BUCKET_BYTES, 0))
    rng = np.random.default_rng(3)
    for _ in range(3):
        values, results = cut.random_step(rng)
        for mine, other in zip(results, whole.step(values), strict=True):
            for a, b in zip(*(tf.nest.flatten([each.sums, each.states]) for each in (mine, other)), strict=True):
                np.testing.assert_array_equal(a, b)
