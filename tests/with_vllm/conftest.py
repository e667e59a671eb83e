"""These tests run where vLLM is installed: `make test-vllm`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]
