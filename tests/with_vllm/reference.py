"""A script: python reference.py FOLDER PROMPT MODEL...

Writes to FOLDER/expected.json what vLLM computes from plain checkpoints, without this package: digests of the weights and an
answer of each model, and the answers of the first one with an adapter.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main(folder: Path, prompt: str, *models: str) -> None:
    llm = LLM(str(folder / models[0]), enforce_eager=True, max_model_len=128, enable_lora=True, max_lora_rank=16)
    settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answer(**options) -> str:
        return llm.generate([prompt], settings, **options)[0].outputs[0].text

    results: dict = {}
    for model in models:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / model)})
        llm.reset_prefix_cache()
        (digests,) = llm.collective_rpc("compute_weight_checksums")
        digests = {name.replace(".base_layer", ""): digest for name, digest in digests.items()}
        results[model] = {"digests": digests, "text": answer()}
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / models[0])})
    for i, adapter in enumerate(("pissa", "extracted"), 1):
        llm.reset_prefix_cache()
        results[adapter] = answer(lora_request=LoRARequest(adapter, i, str(folder / adapter)))
    (folder / "expected.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
