"""PiSSA in distributed training: what DDP synchronizes, and what FSDP 2 saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from processes import on_ranks
from tiny_adapters import NF4, load, moved, small_llama, trained
from tiny_models import inputs, llama

from hf_ext import PissaConfig, QPissaConfig


def pissa(**options) -> PeftModel:
    return get_peft_model(llama(), PissaConfig(r=4, target_modules="all-linear", **options))


def join(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def shard(model: PeftModel) -> PeftModel:
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _ddp(rank: int, folder: str) -> None:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._python_dispatch import TorchDispatchMode

    class Broadcasts(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "broadcast" in str(function):
                self.elements += sum(tensor.numel() for tensor in args[0])
            return function(*args, **(kwargs or {}))

    join(rank, folder)
    counts = []
    for config in (LoraConfig, PissaConfig, QPissaConfig):
        base = load(Path(folder, "base"), NF4 if config is QPissaConfig else None)
        model = DistributedDataParallel(get_peft_model(base, config(r=4, target_modules="all-linear")))
        with Broadcasts() as broadcasts:
            for _ in range(2):
                model(**inputs(model.module)).logits.sum().backward()
        counts.append(broadcasts.elements)
    assert counts[0] == counts[1] == counts[2] > 0, counts
    del model  # or its process group may wait in vain for the other rank
    torch.distributed.destroy_process_group()


def test_ddp_synchronizes_no_more_than_with_lora(tmp_path: Path):
    small_llama().save_pretrained(tmp_path / "base")
    assert on_ranks(_ddp, str(tmp_path)) == [0, 0]


def _fsdp(rank: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    join(rank, folder)
    model = moved(pissa())
    before, expected = get_peft_model_state_dict(model), model(**inputs(model)).logits
    shard(model)
    outputs = model(**inputs(model)).logits
    outputs.sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    on_the_first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        state = get_peft_model_state_dict(model, state_dict=on_the_first)
        assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
    whole = {"full_state_dict": True, "broadcast_from_rank0": True}
    for options in ({}, whole, whole | {"ignore_frozen_params": True, "strict": False}):  # Accelerate's are last
        state = get_model_state_dict(model, options=StateDictOptions(**options))
        loaded = shard(pissa(init_lora_weights=True if "strict" in options else "pissa_niter_1"))
        options.pop("ignore_frozen_params", None)
        set_model_state_dict(loaded, state, options=StateDictOptions(**options))
        torch.testing.assert_close(loaded(**inputs(loaded)).logits, expected, rtol=1e-5, atol=1e-6)
    torch.distributed.destroy_process_group()


def test_fsdp2_trains_saves_whole_adapters_and_loads_them(tmp_path: Path):
    assert on_ranks(_fsdp, str(tmp_path)) == [0, 0]


def _load_on_one_rank(rank: int, folder: str) -> None:
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "LOCAL_RANK": str(rank)}
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed import init_device_mesh
    from transformers import AutoModelForCausalLM

    join(rank, folder)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
    )
    # An `Accelerator` uses FSDP on accelerators only.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), is_main_process=rank == 0, mixed_precision="no", device=torch.device("cpu"),
        torch_device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shards",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shards",)),
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    model = get_peft_model(base, PissaConfig(r=4, target_modules="all-linear"))
    model = fsdp2_prepare_model(accelerator, model)
    torch.testing.assert_close(model(**inputs(model)).logits, torch.load(f"{folder}/logits"), rtol=1e-5, atol=1e-6)
    torch.distributed.destroy_process_group()


def test_weights_that_only_the_first_rank_reads_reach_all_ranks(tmp_path: Path):
    model = llama()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        torch.save(model(**inputs(model)).logits, tmp_path / "logits")
    assert on_ranks(_load_on_one_rank, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize("shape", [(0,), (128,)], ids=["ZeRO-3", "FSDP1"])
def test_shards_that_were_not_gathered_are_an_error(tmp_path: Path, shape: tuple[int, ...]):
    model = trained(llama(), PissaConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"is a shard of the shape .* Gather the parameters first"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
