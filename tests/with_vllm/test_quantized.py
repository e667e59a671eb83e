"""vLLM serves compressed quantized checkpoints by their own format, with the weights of the plain ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_models import perturb
from tiny_quantized import compressed_tensors, llama
from tiny_transfers import build_tokenizer
from vllm_server import OPTIONS

from hf_ext import fm_delta


def test_the_workers_hold_the_weights_of_the_plain_checkpoint(tmp_path):
    write = compressed_tensors("W8A8")  # which vLLM computes on a CPU
    write(llama(), tmp_path / "base")
    write(perturb(llama()), tmp_path / "tuned")
    build_tokenizer(96).save_pretrained(tmp_path / "tuned")
    fm_delta.compress_checkpoint(tmp_path / "tuned", tmp_path / "base", tmp_path / "small")
    digests = {}
    for name, plugin in (("tuned", ""), ("small", "hf_ext")):
        script = [sys.executable, str(Path(__file__).with_name("digests.py")), str(tmp_path / name), str(tmp_path / "digests")]
        environment = os.environ | OPTIONS | {"VLLM_PLUGINS": plugin, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        subprocess.run(script, env=environment, timeout=600, check=True)
        digests[name] = json.loads((tmp_path / "digests").read_text())
    assert digests["small"] == digests["tuned"]
