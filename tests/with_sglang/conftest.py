"""These tests run where SGLang is installed: `make test-sglang`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["*"]
