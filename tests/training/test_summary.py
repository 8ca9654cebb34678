"""`summary.json`: its numbers are JSON's."""

import json

import numpy as np

from tfdist.training.summary import finite_or_none


def test_summary_numbers_are_json():
    assert finite_or_none(np.float32(0.5)) == 0.5
    assert (
        json.dumps([finite_or_none(float("nan")), finite_or_none(np.array([0.25, np.inf]))]) == "[null, [0.25, null]]"
    )
