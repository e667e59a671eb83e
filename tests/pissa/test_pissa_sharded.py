"""Saving PiSSA adapters of sharded models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from processes import on_ranks
from tiny_adapters import trained
from tiny_models import inputs, llama

from hf_ext import PissaConfig


def _fsdp(rank: int, folder: str) -> None:
    from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, mesh = get_peft_model(llama(), PissaConfig(r=4, target_modules="all-linear")), init_device_mesh("cpu", (2,))
    before, expected = get_peft_model_state_dict(model), model(**inputs(model)).logits
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = model(**inputs(model)).logits
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:  # the others get nothing
        state = get_peft_model_state_dict(model, state_dict=whole)
        assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
    destroy_process_group()


def test_a_model_sharded_by_fsdp2_trains_and_saves_whole_adapters(tmp_path: Path):
    assert on_ranks(_fsdp, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize("shape", [(0,), (128,)], ids=["ZeRO-3", "FSDP1"])
def test_shards_that_were_not_gathered_are_an_error(tmp_path: Path, shape: tuple[int, ...]):
    model = trained(llama(), PissaConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"is a shard of the shape .* Gather the parameters first"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
