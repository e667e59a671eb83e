"""With changed internals of Transformers, loading falls back to the plain way, and the other methods still register."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from processes import python
from tiny_checkpoints import edit_config
from tiny_merges import same_tensors, tensors_of, write_tasks
from tiny_models import MODELS, assert_same_weights, fine_tuned
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig
from transformers.quantizers.base import HfQuantizer

from hf_ext import CheckpointError, emr, fm_delta
from hf_ext.adapters import landing
from hf_ext.integration import compat
from hf_ext.integration.loading import decoding, quantizer, rehearsal, renaming, weight_plan


class Gone:
    """In place of a name that has another meaning in a later version: calls and isinstance raise TypeError."""


def break_name(monkeypatch, name: str, module=decoding) -> None:
    monkeypatch.setattr(module, name, Gone())


def break_import(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_ext.integration.loading.decoding", None)


def break_in_the_loop(monkeypatch, attribute: str, broken) -> None:
    """Breaks what runs once Transformers has begun to load, where only the rehearsal can find it."""
    pretend_newer(monkeypatch)
    owner, _, name = attribute.rpartition(".")
    monkeypatch.setattr(getattr(decoding, owner) if owner else decoding, name, broken)


def pretend_newer(monkeypatch) -> None:
    monkeypatch.setattr(rehearsal.versions, "is_untested", lambda package: True)
    rehearsal._failure.cache_clear()


def fails(*args, **kwargs):
    raise AttributeError("'WeightConverter' object has no attribute 'collected_tensors'")


BREAKS = {
    "import": break_import,
    "converter class": lambda patch: break_name(patch, "WeightConverter"),
    "renaming class": lambda patch: break_name(patch, "WeightRenaming", renaming),
    "order of tensors": lambda patch: break_name(patch, "dot_natural_key", renaming),
    "names": lambda patch: break_name(patch, "rename_source_key", renaming),
    "types": lambda patch: break_name(patch, "_expected"),
    "operations get other arguments": lambda patch: break_in_the_loop(patch, "Decode.convert", lambda self, tensors: tensors),
    "tensors are collected elsewhere": lambda patch: break_in_the_loop(patch, "AnyTensor.add_tensor", lambda *args: None),
    "conversions of saving": lambda patch: break_in_the_loop(patch, "Decoding.finish", fails),
}


@pytest.fixture(autouse=True)
def fresh_rehearsal():
    yield
    rehearsal._failure.cache_clear()


@pytest.fixture
def warned(monkeypatch):
    """The errors with which loading took the plain way."""
    errors = []
    monkeypatch.setattr(compat, "warn_of_plain_loading", errors.append)
    return errors


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A mixture of experts with its fine-tune, plain in two files and compressed."""
    folder = tmp_path_factory.mktemp("mixtral")
    fine_tuned(MODELS["mixtral"].build(), folder, max_shard_size="150KB")
    fm_delta.compress_checkpoint(folder / "tuned", folder / "base", folder / "small", level=1)
    assert len(list(folder.joinpath("small").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """Two tasks, their base and, in the folder `merged`, their merge."""
    base, tasks = write_tasks(folder := tmp_path_factory.mktemp("merged"), {"trec": 6, "cr": 2})
    emr.merge(base, tasks, folder / "merged", method="emr")
    return folder


@pytest.mark.parametrize("name", BREAKS)
def test_a_compressed_checkpoint_loads_the_plain_way(checkpoints, tmp_path, monkeypatch, warned, name):
    plain = AutoModelForCausalLM.from_pretrained(checkpoints / "tuned")
    BREAKS[name](monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "small")
    assert len(warned) == 1
    assert_same_weights(model, plain)
    model.save_pretrained(tmp_path / "again", max_shard_size="150KB")
    same_tensors(tensors_of(tmp_path / "again"), tensors_of(checkpoints / "tuned"))
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.parametrize("hook", quantizer.HOOKS)
def test_a_hook_that_is_gone_is_an_error(checkpoints, monkeypatch, hook):
    monkeypatch.delattr(HfQuantizer, hook)
    quantizer._require_transformers.cache_clear()
    with pytest.raises(CheckpointError, match=f"does not work with Transformers .*{hook}.*hf-ext decompress"):
        AutoModelForCausalLM.from_pretrained(checkpoints / "small")


def test_the_plain_way_quantizes_offloads_and_casts(checkpoints, tmp_path, monkeypatch, warned):
    break_import(monkeypatch)
    offloaded = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": str(tmp_path)}
    quantized = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    for options in (quantized, {"dtype": torch.float16}, offloaded):
        models = [AutoModelForCausalLM.from_pretrained(checkpoints / kind, **options) for kind in ("tuned", "small")]
        if options is quantized:
            assert_same_weights(*models)
            continue
        tokens = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            plain, small = (model(tokens).logits for model in models)
        assert small.dtype == plain.dtype
        torch.testing.assert_close(small, plain)
    assert len(warned) == 3


def test_the_warning_names_the_version_and_what_to_do(checkpoints, monkeypatch, caplog):
    break_import(monkeypatch)
    monkeypatch.setattr(compat.versions, "installed", lambda package: "9.9.9")
    AutoModelForCausalLM.from_pretrained(checkpoints / "small")
    (warning,) = (record.getMessage() for record in caplog.records if "fast loading" in record.getMessage())
    assert "Transformers 9.9.9" in warning and "TMPDIR" in warning and "install a newer hf_ext" in warning


def test_the_fast_way_is_taken_with_a_newer_version_that_works(checkpoints, monkeypatch, warned):
    pretend_newer(monkeypatch)
    state = torch.random.get_rng_state()
    loaded = AutoModelForCausalLM.from_pretrained(checkpoints / "small")
    assert not warned
    assert_same_weights(loaded, AutoModelForCausalLM.from_pretrained(checkpoints / "tuned"))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_experts_are_saved_apart_without_host_conversions(checkpoints, tmp_path, monkeypatch):
    remove = HfQuantizer.remove_quantization_config

    def forgetful(self, model):
        remove(self, model)
        vars(model).pop("_weight_conversions", None)

    monkeypatch.setattr(HfQuantizer, "remove_quantization_config", forgetful)
    AutoModelForCausalLM.from_pretrained(checkpoints / "small").save_pretrained(tmp_path / "again", max_shard_size="150KB")
    same_tensors(tensors_of(tmp_path / "again"), tensors_of(checkpoints / "tuned"))


def test_a_merge_loads_the_plain_way_after_host_changes(merged, monkeypatch, warned):
    plain = AutoModelForSequenceClassification.from_pretrained(merged / "merged")
    break_name(monkeypatch, "_expected")
    model = AutoModelForSequenceClassification.from_pretrained(merged / "merged")
    assert len(warned) == 1
    assert_same_weights(model, plain)
    for task in ("cr", "trec"):
        model.set_task(task)
        plain.set_task(task)
        assert_same_weights(model, plain)
    break_name(monkeypatch, "rename_source_key", renaming)
    model = AutoModelForSequenceClassification.from_pretrained(merged / "merged")
    assert_same_weights(model, plain)
    with pytest.raises(CheckpointError, match="hf-ext extract"):
        model.set_task("cr")
    with pytest.raises(CheckpointError, match="Switching to another checkpoint does not work with Transformers"):
        fm_delta.switch(AutoModelForSequenceClassification.from_pretrained(merged / "cr"), merged / "cr")


def test_a_lora_that_no_host_loads_any_more_is_an_error(checkpoints, tmp_path, monkeypatch):
    break_name(monkeypatch, "PeftModel", landing)
    with pytest.raises(CheckpointError, match="cannot load a LoRA of a MixtralForCausalLM: AttributeError: .*from_pretrained"):
        fm_delta.extract_lora(checkpoints / "tuned", checkpoints / "base", tmp_path / "lora")


def test_a_method_that_peft_has_renamed_is_an_error():
    for name in ("_get_adapter_state_dict", "_remove_adapter_name_from_key"):
        code = (
            f"import peft; from peft.tuners.tuners_utils import BaseTuner\nfor kind in (BaseTuner, peft.LoraModel):\n"
            f"    if '{name}' in vars(kind): delattr(kind, '{name}')\n"
            "import hf_ext, torch\npeft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), "
            "hf_ext.PissaConfig(r=2, target_modules=['0']))"
        )
        assert f"has no {name}. Install a newer hf_ext" in python("-c", code).stderr


def test_a_switch_without_host_support_changes_nothing(merged, monkeypatch):
    model, plain, single = (
        AutoModelForSequenceClassification.from_pretrained(merged / name) for name in ("merged", "merged", "trec")
    )
    monkeypatch.setitem(sys.modules, "transformers.initialization", None)
    fm_delta.switch(single, merged / "cr")
    assert_same_weights(single, AutoModelForSequenceClassification.from_pretrained(merged / "cr"))
    monkeypatch.setattr(weight_plan.Loaded, "convert", fails)
    with pytest.raises(CheckpointError, match="Switching tasks does not work with Transformers .*hf-ext extract"):
        model.set_task("cr")
    assert model.active_task == "trec"
    assert_same_weights(model, plain)
    del single.all_tied_weights_keys
    with pytest.raises(CheckpointError, match="Switching to another checkpoint does not work .*from_pretrained"):
        fm_delta.switch(single, merged / "cr")


@pytest.mark.parametrize("how", ["host", "config"])
def test_a_model_that_cannot_be_built_is_an_error_of_merging(tmp_path, monkeypatch, how):
    base, tasks = write_tasks(tmp_path, {"trec": 6, "cr": 2})
    if how == "host":
        monkeypatch.setattr(weight_plan.compat, "without_weights", fails)
    else:
        for folder in tasks.values():
            edit_config(folder, num_attention_heads=5)
    with pytest.raises(CheckpointError, match="Transformers .* cannot build the Bert.* of .*trec.*Correct config.json"):
        emr.merge(base, tasks, tmp_path / "merged", method="emr")


REGISTER = """
import importlib.abc, sys, warnings

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("hf_ext.uni_med.connector", "hf_ext.pissa.config", "hf_ext.emr.config"):
            raise ModuleNotFoundError("No module named 'missing'")

sys.meta_path.insert(0, Missing())
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "hf_ext has not been tested")
import transformers, transformers.models.auto.modeling_auto, transformers.models.auto.processing_auto
import peft
import hf_ext

def error_of(call, *arguments):
    try:
        call(*arguments)
    except ImportError as error:
        print(error)

folder = sys.argv[1]
transformers.AutoModelForCausalLM.from_pretrained(folder)
error_of(transformers.AutoConfig.for_model, "uni_med")
error_of(transformers.quantizers.auto.AutoQuantizationConfig.from_dict, {"quant_method": "hf_ext.emr"})
error_of(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING["QPISSA"])
"""


def test_a_method_that_cannot_register_stops_no_other(checkpoints):
    result = python("-c", REGISTER, checkpoints / "small")
    assert result.returncode == 0, result.stderr
    names = [
        line.split(" is not available: ModuleNotFoundError: No module named 'missing'")[0] for line in result.stdout.split("\n")
    ]
    assert names == ["UniMedConfig", "EMRConfig", "QPissaConfig", ""]


def test_the_auto_classes_do_not_import_the_model_of_uni_med():
    code = (
        "import transformers.models.auto.modeling_auto, transformers.models.auto.processing_auto, transformers.modeling_utils, "
        "hf_ext, sys\nassert 'hf_ext.uni_med.modeling_uni_med' not in sys.modules\n"
        "transformers.AutoConfig.for_model('uni_med')\nassert 'hf_ext.uni_med.modeling_uni_med' in sys.modules\n"
        "assert hf_ext.UniMedConfig in transformers.AutoModelForImageTextToText._model_mapping"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
