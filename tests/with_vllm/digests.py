"""A script: python digests.py MODEL OUT [PLACE STEP...]

Writes the digests of the weights that each of two tensor-parallel workers holds, after going to each step at a place.
"""

import json
import sys
from pathlib import Path

from vllm import LLM


def main(model: str, out: str, place: str | None = None, *steps: str) -> None:
    options = {"weight_transfer_config": {"backend": "hf_ext"}} if place else {}
    llm = LLM(model, enforce_eager=True, max_model_len=128, tensor_parallel_size=2, **options)
    if place:
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"place": place}})
    for step in steps:
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", kwargs={"update_info": {"step": int(step)}})
        llm.collective_rpc("finish_weight_update")
    Path(out).write_text(json.dumps(llm.collective_rpc("compute_weight_checksums")))


if __name__ == "__main__":
    main(*sys.argv[1:])
