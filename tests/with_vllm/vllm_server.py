"""A vLLM server in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from servers import PROMPT, Server

OPTIONS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}  # the mode has the endpoint that digests weights


class VllmServer(Server):
    def __init__(self, model: Path, log: Path, *options: str, **extra):
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
        command += ["--max-model-len", "128", "--host", "127.0.0.1", "--served-model-name", "first", "--api-key", "secret"]
        command += [*options, *(["--model-loader-extra-config", json.dumps(extra)] if extra else [])]
        super().__init__(command, log, OPTIONS | {"VLLM_PLUGINS": "hf_ext"})

    def answer(self, model: str | None) -> tuple[str, str]:
        """Returns the model that answered, as the response names it, and its text."""
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | ({"model": model} if model else {})
        status, response = self.call("/v1/completions", body)
        assert status == 200, response
        return response["model"], response["choices"][0]["text"]

    def refusal(self, model: str) -> tuple[int, str]:
        status, response = self.call("/v1/completions", {"model": model, "prompt": PROMPT})
        return status, response["error"]["message"]

    def digests(self) -> dict[str, str]:
        return self.call("/weight_checker", {"action": "checksum"})[1]["checksums"]
