"""What workers must be given alike is judged before training, on all of them."""

import pytest

ORDER = "The dataset must yield the same elements in the same order on all workers, of which each trains on its share. Received:"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("lengths", "length of x must be the same on all workers of a fit. Received: 64 on worker:0, 48 on worker:1."),
        ("epochs", "epochs must be the same on all workers of a fit. Received: 1 on worker:0, 2 on worker:1."),
        ("validation", "validation_data given must be the same"),
        ("batches", "length of x must be the same on all workers of a fit. Received: 4 on worker:0, 3 on worker:1."),
        ("shuffled", f"{ORDER} shuffle(buffer_size=64, seed="),
        ("batched", f"{ORDER} batch(batch_size=16) on worker:0, batch(batch_size=17) on worker:1. Seeds differ if"),
        ("sampled", f"{ORDER} random(seed="),
        ("harmless", ""),
        ("seeded", ""),
    ],
)
def test_all_workers_say_what_differs(runs, case, sentence):
    for results in runs("multi_worker_mirrored", "unlike_arguments_program")[0]:
        assert results[case].startswith(sentence) and bool(results[case]) == bool(sentence), results[case]
