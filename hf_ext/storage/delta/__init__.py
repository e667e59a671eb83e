"""The delta format: tensors stored as lossless differences from those of a base model (FM-Delta, NeurIPS 2024)."""

LEVELS = (1, 2, 3)  # of compression; here, so that the command line knows them without importing NumPy
DEFAULT_LEVEL = 2
