"""A script: python digests.py MODEL OUT [PLACE STEP...]

Writes the digests of the weights that each of two tensor-parallel workers holds, after going to each step at a place. The word
`prepare` before a step lets the workers prepare it first. Of both workers, only one may keep the weights of the steps.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from vllm import LLM


def main(model: str, out: str, place: str | None = None, *steps: str) -> None:
    os.setpgrp()
    options = {"weight_transfer_config": {"backend": "hf_ext"}} if place else {}
    llm = LLM(model, enforce_eager=True, max_model_len=128, tensor_parallel_size=2, **options)
    if place:
        llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"place": place}})
    for before, step in zip(("", *steps), steps):
        if step == "prepare":
            continue
        info = {"step": int(step)}
        while before == "prepare":
            workers = llm.collective_rpc("prepare_weights", kwargs={"place": place, **info})
            assert [worker["error"] for worker in workers] == [None, None]
            if all(worker["is_ready"] for worker in workers):
                break
            time.sleep(0.01)
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", kwargs={"update_info": info})
        llm.collective_rpc("finish_weight_update")
    assert shared_memories() == bool(place)
    Path(out).write_text(json.dumps(llm.collective_rpc("compute_weight_checksums")))


def shared_memories() -> int:
    """Returns how many descriptors of this package's shared memory the processes of this group have."""
    count = 0
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            is_ours = os.getpgid(int(descriptor.parts[2])) == os.getpgrp()
            count += is_ours and "memfd:hf_ext" in os.readlink(descriptor)
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
