"""`tfdist verify`: the comparison of a user's training on one device with the same training on several."""
