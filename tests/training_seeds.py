"""The seed of the trainings in tests."""

import os


def training_seed(offset: int = 0) -> int:
    """Returns a seed for training or sampling: HF_EXT_TEST_SEED (default 0) plus an offset.

    No test may depend on its value. `make test-processors` runs the tests with several.
    """
    return int(os.environ.get("HF_EXT_TEST_SEED", "0")) + offset
