"""The delta format: tensors stored as lossless differences from those of a base model (FM-Delta, NeurIPS 2024)."""

from typing import NamedTuple

LEVELS = (1, 2, 3)  # of compression; here, so that the command line knows them without importing NumPy
DEFAULT_LEVEL = 2


class Part(NamedTuple):
    """The low-rank part that a matrix is to have, whatever it costs: of a rank, or the smallest with a share of the energy of
    the matrix's change."""

    rank: int | None = None
    energy: float | None = None
