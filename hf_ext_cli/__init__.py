"""The `hf-ext` command. It stands beside the package and imports it only when a command runs, so that help, completion and
mistakes in a command line do not wait for PyTorch."""
