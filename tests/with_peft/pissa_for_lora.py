"""A pytest plugin that runs PEFT's own tests with `PissaConfig` in place of `LoraConfig` (`make test-peft`).

It keeps the tests that use `LoraConfig`. A test that fails because PiSSA refuses something, or differs from LoRA by design,
counts as expected ("xfailed"), for one of the reasons below. Any other failure is a finding.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import peft
import pytest
from huggingface_hub import constants

from hf_ext import PissaConfig

peft.LoraConfig = PissaConfig  # before PEFT's test modules are imported

# Modules that need a GPU, or download a data set when they are imported.
LEFT_OUT = ("gpu", "gptq", "stablediffusion", "vision")

#: Reasons, and a pattern of the test's name and its error. The first match counts.
EXPECTED = {
    "needs the Hub": r"couldn't connect to|Can't find '.*' at|OfflineModeIsEnabled|outgoing traffic has been disabled",
    "another variant of LoRA: PiSSA has its own initialization and forward": r"PissaConfig does not support",
    "another init_lora_weights: PiSSA's start is its definition": r"init_lora_weights=.* is not supported: PissaConfig starts",
    "the layer has fewer components than the test's rank": r"has \d+ principal components",
    "no matrix to decompose: attention modules with fused parameters": r"PiSSA has no adapter for",
    "PEFT's LoRA of this convolution is another operation than the convolution": r"PiSSA does not support convolutions",
    "a combination of adapters is made of the saved ones": r"which add_weighted_adapter cannot combine",
    "PEFT lists the types that mix in one model": r"'PISSA' is not compatible with the `PeftMixedModel`",
    "a layer shows itself as PissaLinear or PissaConv2d": r"test_repr_lora|<class 'hf_ext.pissa.kinds.Pissa",
    "adapter_config.json holds the LoRA of rank 2r, not PiSSA's options": r"test_from_json_file\[.* AssertionError",
    "PissaConfig.from_pretrained skips the decomposition": r"\{'init_lora_weights': True\} != ",
    "the saved adapter is a LoRA of rank 2r": r"test_save_pretrained\w*\[.* size of tensor a|test_lora_pissa_conv.* 16 == 8",
    "PEFT warns that its own start changes the base, which PiSSA leaves": r"test_lora_config_pissa_olora_warns",
    "PissaConfig reads a LoRA, so errors name LoraConfig": r"test_from_pretrained_(forward_compatible|sanity_check)",
    "the saved adapter needs no conversion": r"Save it without path_initial_model_for_weight_conversion",
    "the names of a compiled base are refused": r"is compiled, which changes the names",
    "the saved form needs whole tensors": r"is a shard of the shape .* Gather the parameters first",
    "PiSSA's A and B start at principal components": r"lora_B weights not initialized to zero|test_lora_\w+_default ",
    "A₀ and B₀ are parameters too": r"test_(model_status|parameters_after)_\w+.* AssertionError|test_prefixes_select_corr",
    "training has no hotswapping": r"does not support hotswapping|types found: PISSA|prepare_model_for_compiled_hotswap",
    "the types PISSA and LORA do not mix": r"Cannot combine adapters with different peft types",
    "embeddings in mixed batches": r"Embeddings with PiSSA adapters cannot mix adapters in a batch",
    "the norms of PiSSA's DoRA are not cached": r"test_dora_caching",
    "the test loads an adapter on another, randomly initialized base": r"preserves_input .* it was trained on another base",
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    left_out = any(word in collection_path.stem for word in LEFT_OUT)
    return True if left_out or "LoraConfig" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _uses_lora(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _uses_lora(item: Any) -> bool:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    configs = [value for value in values if isinstance(value, type) and issubclass(value, peft.PeftConfig)]
    if configs:
        return PissaConfig in configs
    return inspect.isfunction(item.function) and "LoraConfig" in inspect.getsource(item.function)


def pytest_runtest_setup(item: Any) -> None:
    # PEFT's tests go online whatever HF_HUB_OFFLINE says, and each of them would try for a minute.
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    has_hub_id = any(isinstance(value, str) and "/" in value for value in values)
    if constants.HF_HUB_OFFLINE and (has_hub_id or "hub_online_once" in inspect.getsource(item.function)):
        pytest.xfail("needs the Hub")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        failure = f"{report.nodeid} {call.excinfo.typename}: {error} {error.__context__ or ''}"
        reason = next((reason for reason, pattern in EXPECTED.items() if re.search(pattern, failure)), None)
        if reason is not None:
            report.outcome, report.wasxfail = "skipped", reason
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter(report.wasxfail for report in terminalreporter.stats.get("xfailed", []) if hasattr(report, "wasxfail"))
    terminalreporter.section("PiSSA in place of LoRA")
    terminalreporter.write_line(f"{len(terminalreporter.stats.get('passed', [])):6,} pass")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:6,} expected: {reason}")
