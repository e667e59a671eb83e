"""`import hf_ext` adds its entries to Transformers' registries and touches nothing else in any library."""

import pytest
from peft import PeftType
from processes import python
from transformers import Blip2VisionConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import hf_ext
from hf_ext import UniMedConfig
from hf_ext.fm_delta.config import FMDeltaConfig
from hf_ext.fm_delta.quantizer import FMDeltaQuantizer
from hf_ext.registration import register

# Everything that the package imports is imported first, so that what changes afterwards is the package's doing.
COMPARE = """
import ast, importlib.util, sys, types
from pathlib import Path

root = Path(importlib.util.find_spec("hf_ext").submodule_search_locations[0])
for path in root.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        for name in [node.module] if isinstance(node, ast.ImportFrom) else names:
            if not name.startswith("hf_ext") and importlib.util.find_spec(name.split(".")[0]):
                module = importlib.import_module(name)
                [getattr(module, attribute) for attribute in names if isinstance(node, ast.ImportFrom)]
assert not any(name.startswith("hf_ext") for name in sys.modules)
import peft, safetensors.torch, transformers, torch

sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("legacy")  # fills the registry
LIBRARIES = ("transformers", "peft", "safetensors", "torch", "huggingface_hub", "accelerate", "tokenizers")

def state():
    values = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            values[name, attribute] = value
            if isinstance(value, type) and value.__module__ == name:
                values |= {(name, f"{attribute}.{member}"): item for member, item in list(vars(value).items())}
            if type(value) is dict and not attribute.startswith("__"):
                values |= {(name, f"{attribute}[{key!r}]"): item for key, item in list(value.items())}
            if type(value).__name__ in ("_LazyAutoMapping", "_LazyConfigMapping"):  # reading all of it would import all models
                values |= {(name, f"{attribute}[{key!r}]"): item for key, item in list(value._extra_content.items())}
    return values

before = state()
import hf_ext
hf_ext.UniMedForConditionalGeneration  # is registered when it is imported
once = state()
hf_ext.registration.register()
importlib.reload(hf_ext)
after = state()
assert len(before) > 50_000
replaced = ("transformers.conversion_mapping", "_checkpoint_conversion_mapping_cache['legacy']")  # by a longer list
assert [key for key in before if before[key] is not after.get(key, after)] == [replaced]
assert str(before[replaced]) == str(after[replaced][:-1])
assert once.keys() == after.keys()
for module, attribute in sorted(after.keys() - before.keys()):
    print(module, attribute)
"""


def test_the_import_adds_its_entries_and_replaces_nothing():
    result = python("-c", COMPARE)
    assert result.returncode == 0, result.stderr
    added = {line.split(" ", 1)[1] for line in result.stdout.splitlines()}
    tables = ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING")
    expected = {f"{table}['{method}']" for table in tables for method in ("hf_ext.fm_delta", "hf_ext.emr")}
    for name in ("PISSA", "QPISSA", "CMOE"):
        expected |= {f"PEFT_TYPE_TO_{table}_MAPPING[{PeftType(name)!r}]" for table in ("CONFIG", "TUNER", "PREFIX")}
    expected |= {"PeftType.PISSA", "PeftType.QPISSA", "PeftType.CMOE", "CONFIG_MAPPING['uni_med']"}
    tables = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM", "PROCESSOR")
    expected |= {f"{table}_MAPPING[{UniMedConfig!r}]" for table in tables}
    expected.add(f"MODEL_MAPPING[{Blip2VisionConfig!r}]")
    # Every output class of a model is registered with torch's trees as soon as it is defined.
    trees = {name for name in added if name.startswith(("SUPPORTED_", "SERIALIZED_"))}
    assert all("hf_ext.uni_med" in name for name in trees)
    assert added - trees == expected


def test_finders_of_an_older_kind_are_skipped():
    code = """
import sys
class Finder:
    def find_module(self, name, path=None): ...
sys.meta_path.insert(0, Finder())
import hf_ext, transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print(transformers.BertModel.__name__, "hf_ext.emr" in AUTO_QUANTIZER_MAPPING)
"""
    result = python("-c", code, hosts=False)
    assert (result.returncode, result.stdout) == (0, "BertModel True\n"), result.stderr


def test_registering_again_changes_nothing():
    register()
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["hf_ext.fm_delta"] is FMDeltaConfig
    assert AUTO_QUANTIZER_MAPPING["hf_ext.fm_delta"] is FMDeltaQuantizer


@pytest.mark.parametrize("mapping", [AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING], ids=["config", "quantizer"])
def test_an_entry_of_that_name_by_another_package_is_left_alone(monkeypatch, mapping):
    monkeypatch.setitem(mapping, "hf_ext.fm_delta", object)
    register()
    assert mapping["hf_ext.fm_delta"] is object


def test_every_public_name_exists():
    for module in (hf_ext, hf_ext.fm_delta, hf_ext.emr, hf_ext.pissa, hf_ext.trans_lora, hf_ext.uni_med):
        assert all(hasattr(module, name) for name in module.__all__)
        assert sorted(module.__all__) == module.__all__
