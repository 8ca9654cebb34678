"""The table of metrics in docs/keras-support.md is the one that its program writes, and has every class of `keras.metrics`."""

import keras

from tests.docs.pages import PAGES
from tools.site import metrics


def test_the_page_has_the_table_that_the_program_writes():
    assert metrics.table() in PAGES["docs/keras-support.md"]


def test_every_class_of_keras_is_in_the_table():
    classes = {
        name
        for name, value in vars(keras.metrics).items()
        if isinstance(value, type) and issubclass(value, keras.metrics.Metric) and value is not keras.metrics.Metric
    }
    known = {name.partition("(")[0] for of_data in metrics.EXAMPLES.values() for name in of_data}
    assert classes == known
