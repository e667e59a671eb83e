"""A script: python digests.py MODEL OUT writes the digests of the weights that each of two tensor-parallel workers holds."""

import json
import sys
from pathlib import Path

from vllm import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=128, tensor_parallel_size=2)
    Path(sys.argv[2]).write_text(json.dumps(llm.collective_rpc("compute_weight_checksums")))
