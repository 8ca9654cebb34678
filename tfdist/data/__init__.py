"""Datasets from arrays, files or generators, shared by all workers or separate, which resume at an example with their random state."""

from tfdist.data.array_files import arrays_from
from tfdist.data.arrays import epochs
from tfdist.data.python_items import from_generator, from_pydataset
from tfdist.data.record_files import records_from
from tfdist.data.rows import rows_from
from tfdist.data.worker_rows import own_rows

__all__ = ["arrays_from", "epochs", "from_generator", "from_pydataset", "own_rows", "records_from", "rows_from"]
