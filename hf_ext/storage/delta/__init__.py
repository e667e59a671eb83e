"""The delta format: tensors stored as lossless differences from those of a base model (FM-Delta, NeurIPS 2024)."""
