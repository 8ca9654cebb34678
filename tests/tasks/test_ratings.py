"""Ratings of a known model: the error that it states is the best one, and the metric is that of plain arithmetic."""

import numpy as np
import pytest

from tfdist.tasks import ratings


@pytest.mark.parametrize("noise", [0.5, 0.0])
def test_no_model_has_a_smaller_error_than_the_noise(noise):
    task = ratings.Ratings(ratings.Options(noise=noise))
    x, y = task.examples(50_000, split=1)
    expected = ratings.expected_ratings(x["user"], x["items"])
    np.testing.assert_allclose(np.sqrt(((y - expected) ** 2).mean()), noise, rtol=0.01)
    np.testing.assert_allclose([expected.mean(), expected.std()], [3, 1], atol=0.02)
    again = task.examples(50_000, split=1)
    np.testing.assert_array_equal(y, again[1])


def test_a_hit_has_the_best_item_among_the_first_predictions():
    task = ratings.Ratings(ratings.Options(top=2))
    model = task.build_model()
    model.compile("sgd", **task.compile_arguments())
    x, y = task.examples(2_000, split=1)
    found = model.evaluate(task.eval_data(64), verbose=0, return_dict=True)
    predictions = model.predict(x, verbose=0)
    of_best = np.take_along_axis(predictions, y.argmax(axis=1)[:, None], axis=1)[:, 0]
    hits = of_best >= np.sort(predictions, axis=1)[:, -2]  # an item may be there twice
    np.testing.assert_allclose(found["top_2"], hits.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["rmse"], np.sqrt(((y - predictions) ** 2).mean()), rtol=1e-5)
