"""Measure FM-Delta on a GPU: decoding there and on the CPU, loading, switching, `set_task`, and tokens of vLLM.

    python benchmarks/gpu.py --shape llama-3-8b

Requires a GPU, and five times the model's size below TMPDIR. Models have the shapes of real ones. Base and changes are drawn: a
`lora` changes each matrix by a product of rank 16, a `light` fine-tune changes few values, a `full` one nearly all.

- `decode`: GB of decoded values per second. "kernels" have the base on the GPU; "with the base" copies it there first, as
  loading does; "CPU" decodes on all cores, then copies. Each result must equal the tensor.
- `models`: seconds to load, cold (files dropped from the page cache) and warm, to switch, and of `set_task`. "GPU" decodes
  there (HF_EXT_DEVICE_DECODE=1), "CPU" is the default, "plain" loads a plain checkpoint, "copy" copies pinned memory.
- `tokens`: seconds to the first token of vLLM, and tokens per second, where it is installed.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import TORCH, fresh, print_table, run_sections, size_of, timed
from sections.scale import BASE_SCALE, SHAPES
from transformers import AutoModelForCausalLM

from hf_ext import emr
from hf_ext.fm_delta import compress_checkpoint, switch
from hf_ext.storage.delta import device_decode
from hf_ext.storage.delta.codec import decode_raw, encode_raw
from hf_ext.storage.delta.payload import read_header
from hf_ext.storage.safetensors_file import RawTensor

KINDS = ("lora", "light", "full")
MATRICES = (8, 4096, 4096)  # decoded at once in `decode`: 512 blocks
WAYS, TOKENS = {"GPU": "1", "CPU": "0"}, 128
load = partial(AutoModelForCausalLM.from_pretrained, device_map="cuda", dtype=torch.bfloat16)


def changed(base: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns a fine-tune of a tensor."""
    values = base.float()
    if base.dim() < 2:
        change = torch.randn_like(values) * 1e-3
    elif kind == "lora":
        *stack, rows, columns = base.shape
        left, right = (torch.randn(*stack, *shape, device=base.device) for shape in ((rows, 16), (16, columns)))
        change = left @ right * (BASE_SCALE / 400)
    else:
        change = torch.randn_like(values) * (BASE_SCALE / (3000 if kind == "light" else 30))
    return (values + change).to(base.dtype)


def seconds_of(action: Callable[[], object], runs: int) -> float:
    """Returns the median of the seconds of a call and of what it starts on the GPU, after an untimed one."""

    def whole() -> None:
        action()
        torch.cuda.synchronize()

    whole()
    return statistics.median(timed(whole) for _ in range(runs))


def times_of(base: torch.Tensor, tensor: torch.Tensor, runs: int) -> tuple[float, dict[str, float]]:
    """Returns the share of a tensor that its payload takes, and the seconds of each way to decode it."""
    raw, device, cores = RawTensor.from_torch(base), base.device, os.cpu_count() or 1
    payload = np.frombuffer(encode_raw(RawTensor.from_torch(tensor), raw, threads=cores), np.uint8)
    header = read_header(payload)
    bodies = device_decode.bodies_of(payload, header)

    def on_gpu(before: torch.Tensor) -> torch.Tensor:
        return device_decode.decode_onto([device_decode.Request(header, bodies, before)], device)[0]

    torch.testing.assert_close(on_gpu(base.clone()), tensor, rtol=0, atol=0)
    seconds = {
        "kernels": seconds_of(lambda: on_gpu(base.clone()), runs) - seconds_of(base.clone, runs),
        "with the base": seconds_of(lambda: on_gpu(raw.to_device(device)), runs),
        "CPU": seconds_of(lambda: decode_raw(payload, raw, header, cores).to_device(device), max(runs // 4, 1)),
        "copy to the GPU": seconds_of(lambda: raw.to_device(device), runs),
    }
    return payload.size / header.size, seconds


def decode(args: argparse.Namespace) -> dict:
    results, rows = {}, []
    for dtype in args.dtypes:
        base = (torch.randn(MATRICES, device="cuda:0") * BASE_SCALE).to(TORCH[dtype])
        for kind in KINDS:
            share, seconds = times_of(base, changed(base, kind), args.runs)
            results[f"{dtype} {kind}"] = seconds
            speeds = (f"{base.nbytes / each / 1e9:.1f}" for each in seconds.values())
            rows.append([dtype, kind, f"{100 * share:.1f} %", *speeds])
    print_table(f"{torch.cuda.get_device_name(0)}: GB/s decoded", ["type", "change", "of the tensor", *seconds], rows)
    return results


def write_models(shape: str, folder: Path) -> None:
    """Writes a base and a fine-tune of each kind, plain and compressed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16).cuda()
    for weight in model.parameters():
        weight.data = (torch.randn_like(weight) * BASE_SCALE).contiguous()
    model.save_pretrained(folder / "base")
    base = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    for kind in ("lora", "full"):
        for name, weight in model.named_parameters():
            weight.data.copy_(changed(base[name].cuda(), kind))
        model.save_pretrained(folder / kind)
        compress_checkpoint(folder / kind, folder / "base", folder / f"{kind}-packed")


def forget(*folders: Path) -> None:
    """Drops the weights in folders from the page cache."""
    for path in (path for folder in folders for path in folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(way: str, folder: Path, action: str, runs: int) -> dict[str, float]:
    """Returns seconds and peak memory of an action, in a process of its own."""
    os.environ[device_decode.SWITCH] = WAYS.get(way, "0")
    one, other = (folder / (kind if way == "plain" else f"{kind}-packed") for kind in ("lora", "full"))
    model, seconds = load(folder / "merged" if action == "set_task" else one), []
    for turn in range(runs + 1):  # the first one compiles the kernels
        if action.startswith("load"):
            model = None
        if action == "load, cold":
            forget(folder / "base", other)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        if action == "switch":
            switch(model, one if turn % 2 else other)
        elif action == "set_task":
            model.set_task(model.tasks[(turn + 1) % 2])
        else:
            model = load(other)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "peak": torch.cuda.max_memory_allocated() / 1e9}


def models(args: argparse.Namespace) -> dict:
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fresh(write_models, args.shape, folder)
        tasks = {kind: str(folder / f"{kind}-packed") for kind in ("lora", "full")}
        fresh(partial(emr.merge, method="switch", bits=1.0), folder / "base", tasks, folder / "merged")
        for action in ("load, cold", "load, warm", "switch", "set_task"):
            for way in ("GPU", "CPU", "plain")[: 2 if action == "set_task" else 3]:
                results[f"{action}, {way}"] = fresh(measured, way, folder, action, args.runs)
        size = size_of(folder / "full", "*.safetensors")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    results["copy"] = {"seconds": seconds_of(pinned.cuda, args.runs), "peak": size / 1e9}
    for what, figures in results.items():
        seconds, peak = figures["seconds"], figures["peak"]
        rows.append([what, f"{seconds:.2f}", f"{size / 1e9 / seconds:.1f}", f"{peak - size / 1e9:.2f}"])
    title = f"{torch.cuda.get_device_name(0)}: {args.shape}, {size / 1e9:.1f} GB in bf16"
    print_table(title, ["step", "seconds", "GB/s", "GPU memory beyond the weights, GB"], rows)
    return results


def generate(folder: Path) -> tuple[float, float]:
    """Returns the seconds to vLLM's first token, and its tokens per second for 64 requests at once."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    engine = LLM(str(folder), load_format="hf_ext", skip_tokenizer_init=True, max_model_len=512)
    prompt = {"prompt_token_ids": [*range(100, 116)]}
    engine.generate([prompt], SamplingParams(max_tokens=1, detokenize=False))
    first = time.perf_counter() - start
    many = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    return first, 64 * TOKENS / timed(engine.generate, [prompt] * 64, many)


def tokens(args: argparse.Namespace) -> dict:
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        fresh(write_models, args.shape, Path(scratch))
        for way, folder in {"GPU": "full-packed", "CPU": "full-packed", "plain": "full"}.items():
            os.environ[device_decode.SWITCH] = WAYS.get(way, "0")
            results[way] = fresh(generate, Path(scratch) / folder)
    rows = [[way, f"{first:.1f}", f"{rate:.0f}"] for way, (first, rate) in results.items()]
    title = f"{torch.cuda.get_device_name(0)}: vLLM, {args.shape}"
    print_table(title, ["decoded on", "seconds to the first token", "tokens/s"], rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b", help="of the models")
    parser.add_argument("--dtypes", nargs="+", choices=TORCH, default=list(TORCH), help="types that `decode` measures")
    if not torch.cuda.is_available() and not {"-h", "--help"} & {*sys.argv}:
        parser.error("there is no GPU that this PyTorch can use. Run it on a machine that has one.")
    sections = [decode, models, *([tokens] if importlib.util.find_spec("vllm") else [])]
    run_sections(parser, {section.__name__: section for section in sections}, has_runs=True)
