"""Training data: images, DICOM files, data sets in common formats, and batches of several tasks."""
