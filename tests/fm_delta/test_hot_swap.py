"""`fm_delta.switch` turns a model in memory into another fine-tune, bit-equal to `from_pretrained`, or leaves it as it was."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import python
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_config, edit_settings, flip_bit
from tiny_merges import write_tasks
from tiny_models import MODELS, assert_same_weights, bert, inputs, llama, perturb, same_bits
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GenerationConfig,
    GPT2Config,
    LlamaForCausalLM,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    XGLMConfig,
    XGLMForCausalLM,
)

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, emr, fm_delta


def write(folder: Path, base: PreTrainedModel, **tuned: PreTrainedModel) -> Path:
    """A folder with `base`, and each fine-tune plain and compressed: `first-plain`, `first`, …"""
    base.save_pretrained(folder / "base")
    for name, model in tuned.items():
        model.save_pretrained(folder / f"{name}-plain")
        fm_delta.compress_checkpoint(folder / f"{name}-plain", folder / "base", folder / name)
    return folder


def two(folder: Path, base: PreTrainedModel) -> Path:
    return write(folder, base, first=perturb(base, 1), second=perturb(base, 2))


def assert_is(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Weights, configuration and what it computes are those of another model."""
    assert_same_weights(model, expected)
    assert model.config.to_dict() == expected.config.to_dict()
    if model.can_generate():
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    with torch.no_grad():
        for output, result in zip(model(**inputs(model))[0], expected(**inputs(expected))[0], strict=True):
            torch.testing.assert_close(output, result)


def assert_follows(model: PreTrainedModel, *folders: Path, **options) -> None:
    """Switches to each folder in turn; the model is then what `from_pretrained` gives."""
    for folder in folders:
        assert fm_delta.switch(model, folder) is model
        assert_is(model, type(model).from_pretrained(folder, **options))


def addresses(model: PreTrainedModel) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in model.state_dict().items()}


def snapshot(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict]:
    return deepcopy(model.state_dict()), model.config.to_dict()


def assert_untouched(model: PreTrainedModel, before: tuple[dict[str, torch.Tensor], dict]) -> None:
    state = model.state_dict()
    assert state.keys() == before[0].keys() and all(same_bits(state[name], before[0][name]) for name in state)
    assert model.config.to_dict() == before[1]


# ---- what it becomes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_switches_bit_by_bit_in_place(tmp_path, name):
    auto, folder = MODELS[name].auto, two(tmp_path, MODELS[name].build())
    model = auto.from_pretrained(folder / "first").eval()
    places = addresses(model)
    for other in ("second", "first-plain", "base", "first"):
        assert_follows(model, folder / other)
        assert addresses(model) == places


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_weights_keep_their_types(tmp_path, name, dtype):
    auto, folder = MODELS[name].auto, two(tmp_path, MODELS[name].build())
    model = auto.from_pretrained(folder / "first", dtype=dtype)
    assert_follows(model, folder / "second", dtype=dtype)


def test_heads_and_labels_follow(tmp_path):
    base, other = bert(3), bert(5)
    other.config.id2label = {i: f"kind {i}" for i in range(5)}
    other.config.label2id = {label: i for i, label in other.config.id2label.items()}
    folder = write(tmp_path, base, three=perturb(base, 1), five=perturb(other, 2))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "three")
    model.classifier.weight.requires_grad_(False)
    body = model.bert.embeddings.word_embeddings.weight
    for name, labels in (("five", 5), ("three", 3), ("five-plain", 5)):
        assert_follows(model, folder / name)
        assert model.num_labels == model.classifier.out_features == labels
        assert not model.classifier.weight.requires_grad and model.classifier.bias.requires_grad
        loss = model(**inputs(model), labels=torch.tensor([0, labels - 1])).loss
        assert torch.isfinite(loss)
    assert model.bert.embeddings.word_embeddings.weight is body


@pytest.mark.parametrize("tied", [False, True])
def test_resized_vocabularies_follow_and_stay_tied(tmp_path, tied):
    base = llama(tied=tied)
    longer = perturb(base, 2)
    longer.resize_token_embeddings(104)
    folder = write(tmp_path, base, first=perturb(base, 1), longer=longer)
    model = AutoModelForCausalLM.from_pretrained(folder / "first")
    for name in ("longer", "first"):
        assert_follows(model, folder / name)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_generation_settings_follow(tmp_path):
    other = perturb(llama(), 2)
    other.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, temperature=0.5)
    folder = write(tmp_path, llama(), first=perturb(llama(), 1), other=other)
    assert_follows(AutoModelForCausalLM.from_pretrained(folder / "first"), folder / "other", folder / "first")
    assert (folder / "other/generation_config.json").exists()


def test_shards_and_a_compressed_base_are_read(tmp_path):
    base = llama()
    folder = two(tmp_path, base)
    model = AutoModelForCausalLM.from_pretrained(folder / "first")
    perturb(base, 3).save_pretrained(folder / "third-plain", max_shard_size="40KB")
    fm_delta.compress_checkpoint(folder / "third-plain", folder / "second", folder / "third")
    assert len(list((folder / "third").glob("*.safetensors"))) > 2
    assert_follows(model, folder / "third")
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(folder / "third-plain"))


def test_the_body_of_a_classifier_becomes_the_body_of_another(tmp_path):
    folder = two(tmp_path, bert())
    model = AutoModel.from_pretrained(folder / "first")
    fm_delta.switch(model, folder / "second")
    assert_same_weights(model, AutoModel.from_pretrained(folder / "second"))


def test_a_weight_untied_by_hand_is_set_like_its_twin(tmp_path):
    folder = two(tmp_path, llama(tied=True))
    model = AutoModelForCausalLM.from_pretrained(folder / "first")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    fm_delta.switch(model, folder / "second")
    expected = AutoModelForCausalLM.from_pretrained(folder / "second").lm_head.weight
    assert same_bits(model.lm_head.weight, expected) and same_bits(model.model.embed_tokens.weight, expected)


def test_a_switched_model_still_trains_and_saves_compressed(tmp_path):
    folder = two(tmp_path, bert())
    model = AutoModelForSequenceClassification.from_pretrained(folder / "first")
    fm_delta.enable(model, folder / "base")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fm_delta.switch(model, folder / "second")
    model.save_pretrained(folder / "again")
    assert (folder / "again/model.safetensors").read_bytes() == (folder / "second/model.safetensors").read_bytes()
    model(**inputs(model), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    trained = AutoModelForSequenceClassification.from_pretrained(folder / "second")
    assert not same_bits(model.classifier.weight, trained.classifier.weight)
    fm_delta.switch(model, folder / "second")
    assert_is(fm_delta.disable(model).eval(), trained)


def test_old_gradients_and_config_fields_are_removed(tmp_path):
    base, named = bert(), perturb(bert(), 3)
    named.config.finetuning_task = "cola"
    folder = write(tmp_path, base, first=perturb(base, 1), named=named)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "first")
    model(**inputs(model)).logits.sum().backward()
    fm_delta.switch(model, folder / "named")
    assert model.config.finetuning_task == "cola" and all(weight.grad is None for weight in model.parameters())
    fm_delta.switch(model, folder / "first")
    assert "finetuning_task" not in model.config.to_dict()
    for part in (model, model.bert):
        assert part.name_or_path == part.config._name_or_path == str(folder / "first")


def encoder_decoder(seed: int, **settings) -> VisionEncoderDecoderModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    words = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(image_size=16, patch_size=8, **sizes), words)
    config.update(settings)
    torch.manual_seed(seed)
    return VisionEncoderDecoderModel(config=config)


def test_settings_of_a_model_stay_out_of_its_parts(tmp_path):
    encoder_decoder(1, pad_token_id=0).save_pretrained(tmp_path / "first")
    encoder_decoder(2, pad_token_id=4, id2label={0: "cat", 1: "dog", 2: "cow"}).save_pretrained(tmp_path / "second")
    model, expected = (VisionEncoderDecoderModel.from_pretrained(tmp_path / name) for name in ("first", "second"))
    fm_delta.switch(model, tmp_path / "second")
    for part in ("config", "encoder.config", "decoder.config"):
        assert attrgetter(part)(model).to_dict() == attrgetter(part)(expected).to_dict()


# ---- memory ------------------------------------------------------------------------------------------------------------

MEMORY = """
import hf_ext
from hf_ext import fm_delta
from processes import peak_above
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("first")
fm_delta.switch(model, "first")  # before, its weights are not in memory but mapped from the file
print(sum(weight.nbytes for weight in model.parameters()))
print(peak_above(lambda: fm_delta.switch(model, "second")))
print(peak_above(lambda: AutoModelForCausalLM.from_pretrained("second")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_switching_holds_no_second_model_in_memory(tmp_path):
    config = llama().config
    config.update({"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 96})
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "first")
    perturb(base).save_pretrained(tmp_path / "second-plain")
    fm_delta.compress_checkpoint(tmp_path / "second-plain", tmp_path / "first", tmp_path / "second", level=1)
    done = python("-c", MEMORY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    size, switching, loading = map(int, done.stdout.split())
    assert size > 40e6 and loading > 0.9 * size
    assert switching < 0.4 * size


def test_threads_switch_one_after_the_other(tmp_path):
    folder = two(tmp_path, bert())
    model = AutoModelForSequenceClassification.from_pretrained(folder / "first")
    ends = {name: AutoModelForSequenceClassification.from_pretrained(folder / name) for name in ("first", "second")}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            for done in [pool.submit(fm_delta.switch, model, folder / name) for name in ends]:
                done.result()
            last = Path(model.name_or_path).name
            assert_same_weights(model, ends[last])


# ---- refused, before anything has changed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return two(tmp_path_factory.mktemp("swap"), bert())


@pytest.fixture
def model(folder) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder / "first")


def refused(model: PreTrainedModel, other: Path, error: type[Exception], *parts: str) -> None:
    before = snapshot(model)
    with pytest.raises(error) as info:
        fm_delta.switch(model, other)
    assert type(info.value) is error
    assert all(part in str(info.value) for part in parts), str(info.value)
    assert_untouched(model, before)


def other_bert(**changes) -> PreTrainedModel:
    config = deepcopy(bert().config)
    config.update(changes)
    torch.manual_seed(1)
    return type(bert())(config)


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: other_bert(num_hidden_layers=3), ["num_hidden_layers", "3", "2"]),
        (lambda: other_bert(hidden_size=64), ["hidden_size", "64", "48"]),
        (lambda: other_bert(hidden_act="relu"), ["hidden_act", "'relu'", "'gelu'"]),
        (llama, ["model_type", "'llama'", "'bert'"]),
        (lambda: BertForMaskedLM(bert().config), ["no tensor for", "BertForSequenceClassification"]),
    ],
)
def test_another_structure_is_refused_by_its_first_difference(tmp_path, model, build, parts):
    build().save_pretrained(tmp_path)
    refused(model, tmp_path, CheckpointError, str(tmp_path), *parts)


def test_a_shape_that_contradicts_the_config_is_refused(tmp_path, model):
    bert(5).save_pretrained(tmp_path)
    bert(3).config.save_pretrained(tmp_path)
    refused(model, tmp_path, CheckpointError, "'classifier.bias'", "[5]", "[3]")


def test_two_tensors_for_what_is_one_are_refused(tmp_path):
    tied = llama(tied=True)
    tied.save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    for name, head in (("equal", 1.0), ("other", 1.5)):
        tied.config.save_pretrained(tmp_path / name)
        both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * head}
        save_file(both, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    refused(model, tmp_path / "other", CheckpointError, "lm_head.weight", "one weight in this model")
    fm_delta.switch(model, tmp_path / "equal")
    assert_same_weights(model, tied)


def xglm(pad_token_id: int) -> PreTrainedModel:
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 2, "max_position_embeddings": 32}
    return XGLMForCausalLM(XGLMConfig(vocab_size=96, pad_token_id=pad_token_id, **sizes))


def mobile_net(output_stride: int) -> PreTrainedModel:
    sizes = {"image_size": 64, "depth_multiplier": 0.25, "num_labels": 3}
    return MobileNetV2ForImageClassification(MobileNetV2Config(output_stride=output_stride, **sizes))


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        (xglm(1), xglm(5), ["embed_positions", "padding_idx"]),  # of which positions are made
        (mobile_net(32), mobile_net(8), ["output_stride", "8", "32"]),
    ],
    ids=["xglm", "mobilenet"],
)
def test_state_that_the_constructor_derives_is_refused(tmp_path, first, second, parts):
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    refused(type(first).from_pretrained(tmp_path / "first"), tmp_path / "second", CheckpointError, *parts)


def test_a_checkpoint_without_a_required_tensor_is_refused(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=96, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, **sizes)
    model = BartForConditionalGeneration(config)
    state = {name: weight for name, weight in model.state_dict().items() if name != "final_logits_bias"}
    model.save_pretrained(tmp_path, state_dict=state)  # from_pretrained makes it zero
    model.final_logits_bias.normal_()
    refused(model, tmp_path, CheckpointError, "no tensor for 'final_logits_bias'")


def test_parameters_that_share_memory_count_as_one(tmp_path):
    folder = write(tmp_path, llama(), first=perturb(llama(), 1))
    model = AutoModelForCausalLM.from_pretrained(folder / "first")
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.data)
    refused(model, folder / "first", CheckpointError, "lm_head.weight", "one weight in this model")


def test_generation_settings_that_cannot_be_read_are_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"cache_implementation": "nope"}')
    refused(perturb(llama(), 1), tmp_path, CheckpointError, "generation_config.json", "cache_implementation")


@pytest.mark.parametrize("place", [0.4, 0.9])
def test_damage_is_found_before_a_weight_changes(folder, model, tmp_path, place):
    bad = shutil.copytree(folder / "second", tmp_path / "bad")
    flip_bit(bad / "model.safetensors", place)
    refused(model, bad, CorruptFileError, "damaged")


def test_a_wrong_base_is_refused_before_a_weight_changes(folder, model, tmp_path):
    bad = shutil.copytree(folder / "second", tmp_path / "bad")
    for base, message in ((tmp_path / "gone", "there is no folder"), (folder / "first-plain", "is another model or revision")):
        edit_settings(bad, base=str(base))
        refused(model, bad, BaseModelError, str(base), message)


def test_an_unusable_checkpoint_is_named(folder, model, tmp_path):
    refused(model, tmp_path / "nothing", CheckpointError, "nothing")
    refused(model, "user/nothing", CheckpointError, "'user/nothing' is neither a folder nor a Hub repository")
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "second-plain/model.safetensors", tmp_path / "bare")
    refused(model, tmp_path / "bare", CheckpointError, "no config.json")
    packed = shutil.copytree(folder / "second-plain", tmp_path / "packed")
    edit_config(packed, quantization_config={"quant_method": "gptq"})
    refused(model, packed, CheckpointError, "quantized (gptq)")


def test_a_model_with_adapters_is_refused(folder, model):
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(CheckpointError, match="PeftModel"):
        fm_delta.switch(wrapped, folder / "second")
    refused(model, folder / "second", CheckpointError, "adapters")
    plain = wrapped.unload()
    fm_delta.switch(plain, folder / "second")
    assert_is(plain.eval(), AutoModelForSequenceClassification.from_pretrained(folder / "second"))


def test_an_offloaded_model_is_refused(folder, tmp_path):
    devices = {"bert.embeddings": "cpu", "bert.pooler": "cpu", "classifier": "cpu", "bert.encoder": "disk"}
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "first-plain", device_map=devices, offload_folder=tmp_path
    )
    with pytest.raises(CheckpointError, match="offloaded"):
        fm_delta.switch(model, folder / "second")


def test_a_merge_is_refused_on_either_side(folder, model, tmp_path):
    base, tasks = write_tasks(tmp_path)
    emr.merge(base, tasks, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    with pytest.raises(CheckpointError, match="set_task"):
        fm_delta.switch(merged, folder / "second")
    refused(model, tmp_path / "merged", CheckpointError, "hf-ext extract")
    for name in (f"{tmp_path / 'merged'}#cr", "org/merged#cr"):
        refused(model, name, CheckpointError, "is a task of a merge", "set_task('cr')", "hf-ext extract")


# ---- a failure half-way ------------------------------------------------------------------------------------------------


def test_a_switch_that_fails_half_way_can_be_repeated(tmp_path):
    config = BertConfig(**bert().config.to_dict() | {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4})
    torch.manual_seed(0)
    folder = two(tmp_path, BertForMaskedLM(config))
    model = AutoModelForMaskedLM.from_pretrained(folder / "first")
    base = load_file(folder / "base/model.safetensors")
    name = "bert.encoder.layer.2.intermediate.dense.weight"
    base[name].view(-1)[3000] += 1  # where the fingerprint takes no sample
    save_file(base, folder / "base/model.safetensors", metadata={"format": "pt"})
    before = model.config.to_dict()
    with pytest.raises(BaseModelError, match=f"(?s){name}.*The model is now a mix of both checkpoints.*Switch it again"):
        fm_delta.switch(model, folder / "second")
    assert model.config.to_dict() == before
    fm_delta.switch(model, folder / "second-plain")
    assert_same_weights(model, AutoModelForMaskedLM.from_pretrained(folder / "second-plain"))
