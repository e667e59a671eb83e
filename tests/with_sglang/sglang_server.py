"""A server of SGLang, in a process of its own, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from servers import PROMPT, Server


class RunningSGLang(Server):
    def __init__(self, model: Path | str, log: Path, plugins: str, **environment: str):
        sglang = str(Path(sys.executable).with_name("sglang"))
        command = [sglang, "serve", "--model-path", str(model), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
        command += ["--context-length", "128", "--max-total-tokens", "512", "--skip-server-warmup"]
        super().__init__(command, log, environment | {"SGLANG_PLUGINS": plugins})

    def switch(self, model: Path | str) -> tuple[int, str]:
        status, response = self.call("/update_weights_from_disk", {"model_path": str(model)})
        return status, response["message"]

    def state(self) -> tuple[dict[str, str], str]:
        """Returns digests of the weights, and an answer."""
        settings = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        text = self.call("/generate", {"text": PROMPT, "sampling_params": settings})[1]["text"]
        (rank,) = self.call("/weights_checker", {"action": "checksum"})[1]["ranks"]
        return rank["checksums"], text
