"""The table of features that exclude each other."""

from __future__ import annotations

import random

import pytest

from tfdist import ConfigError, StrategyConfig
from tfdist.config import STRATEGIES, relations
from tfdist.config.relations import FEATURES, RELATIONS
from tools.site.messages import Message

PAIRS = [pytest.param(each, id=f"{each.one}-{each.other}") for each in RELATIONS]


@pytest.mark.parametrize("relation", PAIRS)
def test_a_sentence_names_both_features_and_a_remedy(relation):
    (sentence,) = relations.faults((relation.one, relation.other))
    assert sentence.startswith(f"{FEATURES[relation.one]} is not possible with {FEATURES[relation.other]}, ")
    assert sentence.endswith(f"; {relation.remedy}.")
    assert Message("", f"; {relation.remedy}.").remedy.startswith(relation.remedy.split()[0])
    assert relation.reason.split()[0] in ("because", "which", "whose", "where")


def test_each_pair_stands_once_and_each_feature_has_a_pair():
    pairs = [frozenset((each.one, each.other)) for each in RELATIONS]
    assert len({*pairs}) == len(pairs) and all(len(pair) == 2 for pair in pairs)
    assert frozenset().union(*pairs) == FEATURES.keys()


def test_all_pairs_are_named_at_once_in_any_order():
    keys = [*FEATURES]
    expected = [each.text({}) for each in RELATIONS]
    for seed in range(3):
        random.Random(seed).shuffle(keys)
        assert [*relations.faults(keys)] == expected
    with pytest.raises(ConfigError) as raised:
        relations.check(keys)
    assert list(raised.value.faults) == expected


def test_features_that_go_together_are_no_error():
    assert not [*relations.faults(("shard_optimizer", "use_ema", "weights_dtype", "mirrored"))]
    relations.check(())


def test_only_the_pairs_of_a_feature_are_named():
    asked = ("mesh", "sync_every", "shard_optimizer", "use_ema")
    sentences = [*relations.faults(asked, "mesh")]
    assert len(sentences) == 2 and all(each.startswith(FEATURES["mesh"]) for each in sentences)


def test_an_error_has_the_names_of_the_user():
    asked = {"sync_every": "", "several_devices": "strategy.devices='0,1'"}
    (sentence,) = relations.faults(asked)
    assert sentence.startswith("strategy.sync_every is not possible with strategy.devices='0,1', ")


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_defaults_of_a_strategy_exclude_nothing(name):
    assert not [*relations.faults(StrategyConfig(name).asked())]


def test_a_configuration_names_all_its_pairs():
    config = StrategyConfig("mirrored", shard_optimizer=True, sync_every=5, batch_shares="by_speed", max_staleness=2)
    assert len([*config.faults()]) == 4


def test_a_strategy_of_your_own_refuses_features():
    refuses = {"jit_compile": "which is a toy; leave it out", "use_ema": "which is a toy; leave it out"}
    asked = {"jit_compile": "jit_compile", "run_eagerly": ""}
    sentence = "jit_compile is not possible with m:toy, which is a toy; leave it out."
    assert [*relations.strategy_faults(asked, "m:toy", refuses)] == [sentence]
