"""A server of SGLang, in a process of its own, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from servers import PROMPT, Server


class RunningSGLang(Server):
    """`workers` share the weights (tensor parallelism), each on a core."""

    def __init__(self, model: Path | str, log: Path, plugins: str, workers: int = 1, **environment: str):
        sglang = str(Path(sys.executable).with_name("sglang"))
        command = [sglang, "serve", "--model-path", str(model), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
        command += ["--context-length", "128", "--max-total-tokens", "512", "--skip-server-warmup"]
        if workers > 1:
            command += ["--tp-size", str(workers)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
        super().__init__(command, log, environment | {"SGLANG_PLUGINS": plugins})

    def switch(self, model: Path | str) -> tuple[int, str]:
        status, response = self.call("/update_weights_from_disk", {"model_path": str(model)})
        return status, response["message"]

    def state(self) -> tuple[list[dict[str, str]], str]:
        """Returns digests of each worker's weights, and an answer."""
        settings = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        text = self.call("/generate", {"text": PROMPT, "sampling_params": settings})[1]["text"]
        workers = self.call("/weights_checker", {"action": "checksum"})[1]["ranks"]
        return [worker["checksums"] for worker in workers], text
