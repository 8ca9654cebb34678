"""`tf.distribute` strategies under which stock Keras 3 computes correct results."""
