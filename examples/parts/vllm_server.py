"""A vLLM server in a process of its own, which takes the steps of a training."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path


class RunningServer:
    """Starts vLLM with a model, under the name `served`, on a free port. `close` ends it."""

    def __init__(self, model: str, served: str = "model", max_length: int = 512):
        model = os.path.abspath(model) if os.path.isdir(model) else model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", served, "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]]
        command += ["--max-model-len", str(max_length), "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--weight-transfer-config", '{"backend": "hf_ext"}']
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "hf_ext"} | os.environ
        self.folder = tempfile.TemporaryDirectory()
        log = Path(self.folder.name, "vllm.log")
        # The working directory is not that of this script: a checkout's own metadata would hide the plugin.
        self.process = subprocess.Popen(
            command, env=environment, cwd=self.folder.name, stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        print("vLLM is starting …", flush=True)
        while True:
            try:
                self.call("/v1/models")
                break
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"vLLM did not start:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.5)

    def call(self, path: str, content: dict | None = None) -> dict:
        body = json.dumps(content).encode() if content else None
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.folder.cleanup()
