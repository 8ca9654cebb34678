"""State that is split over ranks: which elements of a value each rank holds."""
