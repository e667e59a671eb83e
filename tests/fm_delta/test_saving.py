"""After `fm_delta.enable` a model saves compressed through `save_pretrained`, also if the save fails or is killed."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hosts import adapters_of_transformers, host
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_checkpoints import contents
from tiny_models import MODELS, assert_same_weights, bert, llama, perturb, same_bits, t5
from transformers import (
    AutoModelForCausalLM,
    BertModel,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, fm_delta
from hf_ext.storage.files import STAGE


def is_compressed(folder: Path) -> bool:
    """Whether config.json says so; the weights must agree."""
    says = "quantization_config" in json.loads((folder / "config.json").read_text())
    for path in folder.glob("*.safetensors"):
        assert all(weight.dtype == torch.uint8 for weight in load_file(path).values()) == says
    return says


@pytest.fixture
def base(tmp_path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def model(base) -> PreTrainedModel:
    """A fine-tune of the llama in `base` that saves compressed."""
    return fm_delta.enable(perturb(llama()), base)


# ---- what is saved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_save_gives_the_bytes_of_compressing_a_plain_save(tmp_path, name):
    tiny = MODELS[name]
    tiny.build().save_pretrained(tmp_path / "base")
    tuned = perturb(tiny.build())
    tuned.save_pretrained(tmp_path / "plain")
    fm_delta.enable(tuned, tmp_path / "base").save_pretrained(tmp_path / "small")
    assert is_compressed(tmp_path / "small") and not is_compressed(tmp_path / "plain")
    plain, small = contents(tmp_path / "plain"), contents(tmp_path / "small")
    assert plain.keys() | {"README.md"} == small.keys()
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("small", "plain")]
    assert sizes[0] < sizes[1]
    assert_same_weights(tiny.auto.from_pretrained(tmp_path / "small"), tiny.auto.from_pretrained(tmp_path / "plain"))
    fm_delta.compress_checkpoint(tmp_path / "plain", tmp_path / "base", tmp_path / "compressed", verify=True)
    assert contents(tmp_path / "compressed") == small


def test_the_shards_of_an_earlier_save_are_removed(tmp_path, model):
    sizes = {}
    for size in ("60KB", "150KB", "1GB", "60KB", "150KB"):
        model.save_pretrained(tmp_path / "small", max_shard_size=size)
        assert is_compressed(tmp_path / "small")
        shards = sorted(path.name for path in (tmp_path / "small").glob("*.safetensors"))
        assert sizes.setdefault(size, shards) == shards
        assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), model)
    assert len({len(shards) for shards in sizes.values()}) == 3


@pytest.mark.parametrize("size", ["60KB", "1GB"])
def test_a_variant_is_compressed(tmp_path, model, size):
    model.half().save_pretrained(tmp_path / "small", variant="fp16", max_shard_size=size)
    assert is_compressed(tmp_path / "small")
    assert all(path.name.startswith("model.fp16") for path in (tmp_path / "small").glob("*.safetensors"))
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small", variant="fp16"), model)


@pytest.mark.parametrize("positional", [False, True])
def test_a_save_compresses_the_state_dict_that_it_is_given(tmp_path, model, positional):
    other = perturb(llama(), seed=2)
    arguments, options = ((True, other.state_dict()), {}) if positional else ((), {"state_dict": other.state_dict()})
    model.save_pretrained(tmp_path / "small", *arguments, **options)
    assert is_compressed(tmp_path / "small")
    assert_same_weights(LlamaForCausalLM.from_pretrained(tmp_path / "small"), other)


@host("accelerate>=1.15")
def test_a_model_offloaded_to_disk_saves_compressed(tmp_path, base, model):
    model.save_pretrained(tmp_path / "small")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", device_map={"": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    fm_delta.enable(loaded, base).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "small/model.safetensors").read_bytes()


# ---- copies of the model -----------------------------------------------------------------------------------------------


def unpickled(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


def torch_loaded(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled, torch_loaded])
def test_a_copy_saves_and_is_disabled_on_its_own(tmp_path, model, copied):
    twin = copied(model)
    with torch.no_grad():
        twin.lm_head.weight += 1
    twin.save_pretrained(tmp_path / "twin")
    model.save_pretrained(tmp_path / "small")
    for folder, saved in (("twin", twin), ("small", model)):
        assert is_compressed(tmp_path / folder)
        assert_same_weights(LlamaForCausalLM.from_pretrained(tmp_path / folder), saved)
    twin.load_state_dict(load_file(tmp_path / "small/model.safetensors"))
    assert_same_weights(twin, model)
    fm_delta.disable(twin).save_pretrained(tmp_path / "twin")
    model.save_pretrained(tmp_path / "small")
    assert is_compressed(tmp_path / "small") and not is_compressed(tmp_path / "twin")
    assert not twin._load_state_dict_pre_hooks and model._load_state_dict_pre_hooks


def test_a_copy_does_not_keep_the_original_alive_in_a_pickle(model):
    assert len(pickle.dumps(model)) < 1.2 * len(pickle.dumps(perturb(llama())))


def test_a_compiled_model_saves_compressed(tmp_path, model):
    torch.compile(model).save_pretrained(tmp_path / "small")
    assert is_compressed(tmp_path / "small")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), model)


def test_a_relative_base_is_recorded_as_absolute(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = fm_delta.enable(perturb(llama()), "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model.save_pretrained("small")
    assert is_compressed(Path("small"))
    monkeypatch.chdir(tmp_path)
    assert_same_weights(AutoModelForCausalLM.from_pretrained("elsewhere/small"), model)


# ---- on and off --------------------------------------------------------------------------------------------------------


def test_disable_makes_the_model_what_it_was(tmp_path, base):
    model = perturb(llama())
    before = set(vars(model))
    assert fm_delta.disable(model) is model
    assert fm_delta.enable(model, base) is model
    assert fm_delta.disable(model) is model
    assert set(vars(model)) == before and not model._load_state_dict_pre_hooks
    model.save_pretrained(tmp_path / "plain")
    assert not is_compressed(tmp_path / "plain")


def test_enabling_again_replaces_the_base(tmp_path, base, model):
    perturb(llama(), seed=7).save_pretrained(tmp_path / "other")
    fm_delta.enable(model, base)
    fm_delta.enable(model, tmp_path / "other")
    assert len(model._load_state_dict_pre_hooks) == 1
    model.save_pretrained(tmp_path / "small")
    assert fm_delta.inspect(tmp_path / "small").base == "../other"


def test_only_the_enabled_object_changes(tmp_path, model):
    other = perturb(llama())
    other.save_pretrained(tmp_path / "plain")
    assert not is_compressed(tmp_path / "plain")
    assert "save_pretrained" not in vars(type(model)) and other.save_pretrained.__func__ is PreTrainedModel.save_pretrained


def test_an_enabled_model_loads_state_dicts_of_both_kinds(tmp_path, model):
    model.save_pretrained(tmp_path / "small")
    expected = fm_delta.disable(copy.deepcopy(model))
    state_dict = load_file(tmp_path / "small/model.safetensors")
    keys = {name: weight.data_ptr() for name, weight in state_dict.items()}
    for state in (state_dict, expected.state_dict()):
        torch.nn.init.zeros_(model.lm_head.weight)
        assert model.load_state_dict(state) == ([], [])
        for name, weight in model.state_dict().items():
            assert same_bits(weight, expected.state_dict()[name])
    assert keys == {name: weight.data_ptr() for name, weight in state_dict.items()}
    outer = torch.nn.ModuleDict({"inner": model})
    torch.nn.init.zeros_(model.lm_head.weight)
    outer.load_state_dict({f"inner.{name}": weight for name, weight in state_dict.items()})
    assert same_bits(model.lm_head.weight, expected.lm_head.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        expected.load_state_dict(state_dict)


def test_a_damaged_state_dict_is_refused(tmp_path, model):
    model.save_pretrained(tmp_path / "small")
    state_dict = load_file(tmp_path / "small/model.safetensors")
    state_dict["lm_head.weight"][-1] ^= 1
    with pytest.raises(CorruptFileError, match="lm_head.weight"):
        model.load_state_dict(state_dict)


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_an_unreadable_base_is_refused_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    for base in (tmp_path / "empty", tmp_path / "nothing", "not/a/hub/id"):
        model = llama()
        with pytest.raises((BaseModelError, CheckpointError), match=str(base)):
            fm_delta.enable(model, base)
        assert "save_pretrained" not in vars(model)


def test_a_quantized_model_needs_a_quantized_base(base):
    pytest.importorskip("bitsandbytes")
    settings = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings)
    with pytest.raises(BaseModelError, match="is not quantized, but the model is"):
        fm_delta.enable(model, base)


def test_other_objects_than_transformers_models_are_refused(base, model):
    adapted = get_peft_model(perturb(llama()), LoraConfig(target_modules=["q_proj"]))
    for other in (torch.nn.Linear(2, 2), model.state_dict(), adapted):
        with pytest.raises(CheckpointError, match=type(other).__name__):
            fm_delta.enable(other, base)


def test_a_distributed_checkpoint_is_refused(tmp_path, model):
    with pytest.raises(CheckpointError, match="distributed"):
        model.save_pretrained(tmp_path / "small", distributed_checkpoint=True)
    assert not (tmp_path / "small").exists()


def test_a_base_that_has_nothing_in_common_is_warned_about(tmp_path, caplog):
    t5().save_pretrained(tmp_path / "base")
    tuned = fm_delta.enable(perturb(bert()).bert, tmp_path / "base")
    assert [str(tmp_path / "base") in record.getMessage() for record in caplog.records] == [True]
    tuned.save_pretrained(tmp_path / "small")
    assert_same_weights(BertModel.from_pretrained(tmp_path / "small"), tuned)


@adapters_of_transformers
def test_a_model_with_an_adapter_saves_the_adapter_alone(tmp_path, model):
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list((tmp_path / "adapter").glob("model*")) and not (tmp_path / "adapter/config.json").exists()
    fm_delta.disable(model).save_pretrained(tmp_path / "plain")
    assert contents(tmp_path / "adapter") == contents(tmp_path / "plain")


def test_a_process_that_is_not_the_main_one_writes_nothing(tmp_path, model):
    model.save_pretrained(tmp_path / "small", is_main_process=False)
    assert not (tmp_path / "small").exists()
    model.save_pretrained(tmp_path / "small")
    stage = tmp_path / f".small{STAGE}"
    stage.mkdir()
    (stage / "file").write_text("of the main process, which is still at work")
    before = contents(tmp_path)
    model.save_pretrained(tmp_path / "small", is_main_process=False, max_shard_size="60KB")
    assert contents(tmp_path) == before


# ---- interrupted saves -------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_earlier_one_as_it_was(tmp_path, base, model):
    model.save_pretrained(tmp_path / "small")
    before = contents(tmp_path / "small")
    with pytest.raises(AttributeError):  # in the middle of Transformers' own save
        model.save_pretrained(tmp_path / "small", state_dict={"lm_head.weight": [0.0]})
    assert contents(tmp_path / "small") == before and not list(tmp_path.glob(".*"))
    shutil.move(base, tmp_path / "gone")
    for folder in ("small", "new"):
        with pytest.raises(BaseModelError, match=str(base)):
            model.save_pretrained(tmp_path / folder)
    assert contents(tmp_path / "small") == before and not (tmp_path / "new").exists()
