"""Which generators of random numbers Python code is found to draw from."""

from __future__ import annotations

import functools
import json
import random

import keras
import numpy as np
import pytest

from tfdist.data import python_generators
from tfdist.data.python_generators import PROCESS_GENERATORS, find_generators, get_states, set_states

OF_MODULE = {"deep": [np.random.default_rng(1)]}
PYTHONS, NUMPYS = PROCESS_GENERATORS


def draws_from_module():
    return OF_MODULE["deep"][0].normal()


def shuffles_a_global():
    np.random.shuffle(OF_MODULE)


def gives_a_global():
    return draws_from_it(OF_MODULE)


def draws_from_it(held):
    return np.random.normal()


def draws_from_process():
    return [np.random.normal() for _ in range(2)], random.random()


def makes_its_own():
    return np.random.default_rng(3).normal() + keras.random.normal(())


class Holder:
    def __init__(self, generator):
        self.inner = {"generator": generator}

    def draw(self):
        return random.choice([1, 2])


class Class:
    rng = np.random.default_rng(2)


class Layer(keras.layers.Layer):
    def __init__(self, seeds):
        super().__init__()
        self.seeds = seeds


def test_generators_are_found_where_code_reaches_them():
    own = np.random.RandomState(1)
    assert find_generators(draws_from_module) == OF_MODULE["deep"]
    assert set(find_generators(shuffles_a_global)) == {*OF_MODULE["deep"], NUMPYS}
    assert set(find_generators(gives_a_global)) == {*OF_MODULE["deep"], NUMPYS}
    assert set(find_generators(draws_from_process)) == {PYTHONS, NUMPYS}
    assert find_generators(makes_its_own, np.ones(3), "text", keras.layers.Dense(1)) == []
    assert set(find_generators(Holder(own))) == {own, PYTHONS}
    assert set(find_generators(Holder(own).draw)) == {own, PYTHONS}
    assert find_generators(functools.partial(lambda rng, x: x, own)) == [own]
    assert find_generators(lambda x, rng=own: x) == [own]
    assert find_generators(Class) == [Class.rng]
    seeds = keras.random.SeedGenerator(1)
    assert find_generators(lambda: keras.random.normal((), seed=seeds)) == [seeds]
    assert find_generators(Layer(seeds)) == [], "the model's state has it"
    assert find_generators(lambda: np.mean(own.normal(size=3))) == [own]


@pytest.mark.parametrize(
    "make",
    [
        np.random.default_rng,
        np.random.RandomState,
        random.Random,
        np.random.PCG64,
        keras.random.SeedGenerator,
        PROCESS_GENERATORS.__getitem__,
    ],
)
def test_a_state_comes_back(make):
    generator = make(1)

    def draw():
        if isinstance(generator, np.random.BitGenerator):
            return int(generator.random_raw())
        if isinstance(generator, keras.random.SeedGenerator):
            return float(keras.random.normal((), seed=generator))
        return float(generator.random())

    before = json.loads(json.dumps(get_states([generator])))
    expected = [draw() for _ in range(3)]
    set_states([generator], before)
    assert [draw() for _ in range(3)] == expected
    python_generators.reset(generator)
    first = draw()
    python_generators.reset(generator)
    assert draw() == first
    set_states([generator], before)
