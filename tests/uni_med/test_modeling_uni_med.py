"""UniMedForConditionalGeneration does what every Transformers model does."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from hosts import host
from safetensors.torch import load_file, save_file
from tiny_adapters import NF4, small_llama
from tiny_models import assert_same_weights, gpt2, llama, mixtral, placed, same_bits
from tiny_uni_med import TOKENS, assert_likeliest, batch, blip2, image, processor, rows, save_parts, uni_med
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig, pipeline

from hf_ext import UniMedConfig, UniMedForConditionalGeneration, UniMedProcessor

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
KINDS = [{}, {"connector": "mlp"}, {"router": "sparse"}, {"router": "hard", "connector": "moe_linear"}]


@pytest.fixture(params=KINDS, ids=lambda options: "-".join(options.values()) or "default")
def model(request):
    return uni_med(**request.param)


def logits(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**placed(inputs, model)).logits


# Inputs and outputs


def test_the_outputs_are_those_of_any_language_model_with_the_loss_of_the_answers(model):
    inputs = batch()
    out = model(**inputs, output_hidden_states=True, output_router_weights=True, use_cache=True)
    size, length = inputs["input_ids"].shape
    assert out.logits.shape == (size, length, 96) and out.loss.shape == ()
    assert [tuple(state.shape) for state in out.hidden_states] == [(size, length, 64)] * 3
    assert out.image_hidden_states.shape == (3, TOKENS, 64)
    assert out.past_key_values.get_seq_length() == length
    if model.config.connector.startswith("moe"):
        assert out.router_weights.shape == (3, TOKENS, 5)
    else:
        assert out.router_weights is None
    assert model(**inputs).router_weights is None
    assert model(**inputs, return_dict=False)[0] == out.loss
    labels = inputs["labels"][:, 1:]
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[:, :-1][labels >= 0], labels[labels >= 0]))


def test_rows_do_not_see_each_other(model):
    """Tasks are mixed, and so are rows with and without images; each row gives what it gives alone."""
    together = logits(model, batch())
    for i, row in enumerate(rows()):
        alone = logits(model, batch(samples=[row]))[0]
        torch.testing.assert_close(together[i, : len(alone)], alone, rtol=1e-4, atol=1e-5)


def test_the_task_matters_where_experts_are_routed_by_it():
    model = uni_med()
    inputs = batch()
    other = logits(model, inputs | {"image_tasks": inputs["image_tasks"].roll(1)})
    assert not torch.allclose(other, logits(model, inputs), atol=1e-5)
    mlp = uni_med(connector="mlp")
    inputs.pop("image_tasks")
    assert logits(mlp, inputs).isfinite().all()
    with pytest.raises(ValueError, match=r"routes images by task.* such as '\[vqa\] …'.* The tasks are vqa, .*caption"):
        model(**inputs)


def test_a_row_may_have_several_images():
    model, make = uni_med(), processor()
    inputs = make(
        images=[[image(0), image(1)], [image(2)]], text=["how many cells ?", "what is there ?"], task=["vqa", "cls"],
        return_tensors="pt",
    )  # fmt: skip
    assert inputs["image_tasks"].tolist() == [0, 0, 4]
    together = logits(model, inputs)
    swapped = make(images=[[image(1), image(0)]], text=["how many cells ?"], task="vqa", return_tensors="pt")
    assert not torch.allclose(together[0], logits(model, swapped)[0], atol=1e-5)
    alone = make(images=[[image(0), image(1)]], text=["how many cells ?"], task="vqa", return_tensors="pt")
    options = GREEDY | {"num_beams": 2, "length_penalty": 0.0, "return_dict_in_generate": True, "output_scores": True}
    beams, expected = (model.generate(**each, **options).sequences_scores for each in (inputs, alone))
    torch.testing.assert_close(beams[:1], expected, rtol=1e-4, atol=1e-4)


class OneDevice(TorchDispatchMode):
    """As on GPUs, an operation takes tensors of one device, apart from scalars and copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim()]
        assert len({tensor.device for tensor in tensors}) <= 1 or func is torch.ops.aten.copy_.default, func
        return func(*args, **kwargs or {})


def test_images_reach_a_language_model_on_another_device():
    model, inputs = uni_med(), batch(answers=False)
    images = model.get_image_features(inputs["pixel_values"], inputs["image_tasks"])
    add_hook_to_module(model.get_input_embeddings().to("meta"), AlignDevicesHook(execution_device=torch.device("meta")))
    with OneDevice():
        assert model._embeddings(inputs["input_ids"], images).device.type == "meta"


def test_the_image_token_may_be_in_the_vocabulary_or_not():
    model, inputs = uni_med(), batch()
    assert model.config.image_token_id == model.config.text_config.vocab_size
    expected = logits(model, inputs)
    inside = inputs["input_ids"].masked_fill(inputs["input_ids"] == model.config.image_token_id, 90)
    model.config.image_token_id = 90
    assert torch.equal(logits(model, inputs | {"input_ids": inside}), expected)


def test_inputs_that_do_not_fit_are_errors():
    model, inputs = uni_med(), batch()
    moved = inputs["input_ids"].clone()
    moved[0, 2], moved[1, 2] = 9, model.config.image_token_id
    pixels, tasks = inputs["pixel_values"], inputs["image_tasks"]
    text = {name: value for name, value in inputs.items() if name not in ("pixel_values", "image_tasks")}
    embeds = {"inputs_embeds": torch.zeros(1, 3, 64), "pixel_values": pixels, "image_tasks": tasks}
    for arguments, message in (
        (inputs | {"pixel_values": pixels[:2], "image_tasks": tasks[:2]}, r"\[8, 0, 8, 8\] image tokens .* but 2 images of 8"),
        (inputs | {"input_ids": moved}, r"\[7, 1, 8, 8\] image tokens in the rows"),
        (text, "but no images: give pixel_values"),
        (inputs | {"image_tasks": tasks + 3}, "for 3 images: give one for each image, within 0…4"),
        (inputs | {"image_tasks": tasks[:2]}, "for 3 images: give one for each image"),
        ({"attention_mask": inputs["attention_mask"]}, "either input_ids or inputs_embeds"),
        (embeds, "give input_ids, not inputs_embeds"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**arguments)


# Saving and loading


def test_it_loads_from_shards_in_any_dtype_and_place(tmp_path):
    model = uni_med()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    expected = logits(model, batch())
    assert_same_weights(model, UniMedForConditionalGeneration.from_pretrained(tmp_path))
    mapped = UniMedForConditionalGeneration.from_pretrained(tmp_path, device_map="auto")
    same_place = copy.deepcopy(model).to(mapped.device)
    torch.testing.assert_close(logits(mapped, batch()), logits(same_place, batch()))
    offloaded = UniMedForConditionalGeneration.from_pretrained(
        tmp_path, device_map={"vision_tower": "cpu", "connector": "disk", "language_model": "cpu"},
        offload_folder=tmp_path / "off",
    )  # fmt: skip
    torch.testing.assert_close(logits(offloaded, batch()), expected)
    half = UniMedForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert (logits(half, batch()).float() - expected).norm() < 0.05 * expected.norm()


def test_missing_weights_start_as_in_a_new_model(tmp_path):
    uni_med(connector="mlp").save_pretrained(tmp_path)
    loaded, info = UniMedForConditionalGeneration.from_pretrained(
        tmp_path, connector="moe_mlp", ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {name.split(".")[1] for name in info["missing_keys"]} == {"router", "task_tokens"}
    connector = loaded.connector
    assert 0 < connector.task_tokens.abs().max() < 0.2
    assert 0 < connector.router.token_weight.abs().max() <= 256**-0.5
    assert 0 < connector.experts.up.abs().max() <= 128**-0.5


HYBRID = transformers.FalconH1Config(  # it computes buffers of its layers
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16,
)  # fmt: skip
TEXTS = [{"text": text} for text in (llama(tied=True).config, mixtral().config, HYBRID)]


@pytest.mark.parametrize("options", [*KINDS, *TEXTS], ids=["default", *map(str, KINDS[1:]), "tied", "mixtral", "hybrid"])
def test_a_saved_model_is_loaded_bit_for_bit(tmp_path, options):
    model = uni_med(**options)
    model.save_pretrained(tmp_path)
    for kind in (UniMedForConditionalGeneration, AutoModelForImageTextToText):
        loaded = kind.from_pretrained(tmp_path)
        assert_same_weights(model, loaded)
        assert not loaded.training
        is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert is_tied == bool(model.config.text_config.tie_word_embeddings)
        torch.testing.assert_close(logits(loaded, batch()), logits(model, batch()))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, UniMedConfig) and config.to_dict() | {"_name_or_path": ""} == model.config.to_dict()


def test_embeddings_are_resized():
    model = uni_med()
    expected = logits(model, batch())
    model.resize_token_embeddings(120)
    assert model.config.text_config.vocab_size == 120
    assert model.get_input_embeddings().num_embeddings == 120 and model.get_output_embeddings().out_features == 120
    torch.testing.assert_close(logits(model, batch())[..., :96], expected)
    model(**batch()).loss.backward()


# Attention, gradients, precision


def test_attention_implementations_agree(tmp_path):
    model = uni_med()
    model.save_pretrained(tmp_path)
    eager = UniMedForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    assert {part.config._attn_implementation for part in (eager.vision_tower, eager.language_model)} == {"eager"}
    inputs = batch()
    out, length = eager(**inputs, output_attentions=True), inputs["input_ids"].shape[1]
    assert [tuple(attention.shape) for attention in out.attentions] == [(4, 4, length, length)] * 2
    torch.testing.assert_close(out.logits, logits(model, inputs), rtol=1e-4, atol=1e-5)
    kinds = {"vision_config": "eager", "text_config": "sdpa"}
    mixed = UniMedForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=kinds)
    for part, kind in zip((mixed.vision_tower, mixed.language_model), kinds.values()):
        assert part.config._attn_implementation == kind


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model = uni_med().train()
    model(**batch()).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    model(**batch()).loss.backward()
    for name, parameter in model.named_parameters():
        if "language_model" in name or "connector" in name:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


# Generation

WAYS = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
CHUNKS = pytest.param({"prefill_chunk_size": 5}, marks=host("transformers>=5.24"))
NARROW = transformers.OPTConfig(  # its embeddings are narrower than its hidden states
    vocab_size=96, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=1, num_attention_heads=2
)
LINEAR = transformers.MambaConfig(vocab_size=96, hidden_size=64, state_size=8, num_hidden_layers=2)  # its cache has no length


@pytest.mark.parametrize("options", [*WAYS, CHUNKS], ids=str)
def test_generating_takes_the_most_likely_token_each_time(model, options):
    inputs = batch(answers=False)
    ids = model.generate(**inputs, **GREEDY, **options)
    assert ids.shape[1] == inputs["input_ids"].shape[1] + 6
    assert_likeliest(model, inputs, ids)


@pytest.mark.parametrize(("options", "tokens"), [
    *((options, 6) for options in (*KINDS, {"text": NARROW})),
    ({"text": gpt2().config}, 3),
    pytest.param({"text": LINEAR}, 6, marks=host("transformers>=5.24")),
], ids=[*map(str, KINDS), "narrow embeddings", "gpt2", "mamba"])  # fmt: skip
def test_generating_does_not_depend_on_padding(options, tokens):
    model = uni_med(**options)
    written = model.generate(**batch(answers=False), **GREEDY | {"max_new_tokens": tokens})[:, -tokens:]
    for i, row in enumerate(rows()):
        alone = batch(False, [row])
        assert_likeliest(model, alone, torch.cat([alone["input_ids"], written[i : i + 1]], 1))


def test_text_alone_is_generated_as_by_the_language_model():
    model = uni_med()
    ids = torch.tensor([[3, 14, 15, 16, 4]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_likeliest(model.language_model, inputs, model.generate(**inputs, **GREEDY))
    embeds = model.get_input_embeddings()(ids)
    by_embeds = model.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), **GREEDY)
    assert_likeliest(model.language_model, inputs, torch.cat([ids, by_embeds], 1))


@host("transformers>=5.19")
def test_images_can_be_encoded_beforehand():
    model, inputs = uni_med(), batch(answers=False)
    with torch.no_grad():
        images = model.get_image_features(inputs["pixel_values"], inputs["image_tasks"])
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert_likeliest(model, inputs, model.generate(**text, mm_encoder_outputs={"image": images}, **GREEDY))


# Other towers, other language models, quantization


def test_a_model_of_two_pretrained_parts(tmp_path):
    vision, text = save_parts(tmp_path)
    joined = UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text, connector="moe_mlp", router="sparse")
    make = UniMedProcessor.from_vision_text_pretrained(vision, text)
    assert (joined.config.router, joined.config.image_token_id) == ("sparse", make.image_token_id)
    assert_same_weights(joined.language_model, llama())
    inputs = make(images=image(), text="what is there ?", task="cls", return_tensors="pt")
    expected = logits(joined, inputs)
    joined.save_pretrained(tmp_path / "both")
    make.save_pretrained(tmp_path / "both")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "both")
    torch.testing.assert_close(logits(loaded, inputs), expected)
    assert loaded.generation_config.eos_token_id == llama().generation_config.eos_token_id
    with pytest.raises(TypeError, match="no routr"):
        UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text, routr="soft")
    half = UniMedForConditionalGeneration.from_vision_text_pretrained(vision, text, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert logits(half, inputs).isfinite().all()


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHED = {"image_size": 32, "patch_size": 8}
TOWERS = {  # by name: class, fields of its configuration
    "clip": ("CLIP", {"text_config": SMALL | {"vocab_size": 99}, "vision_config": SMALL | PATCHED}),
    "siglip": ("SiglipVision", SMALL | PATCHED),
    "registers": ("Dinov2WithRegisters", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} | PATCHED),
    "swin": ("Swin", {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4} | PATCHED | {"patch_size": 2}),
    "convnext": ("ConvNext", {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "image_size": 32}),
}


def tower_of(kind: str) -> transformers.PreTrainedModel:
    if kind == "blip2":
        return blip2()
    torch.manual_seed(0)
    name, fields = TOWERS[kind]
    options = {"add_pooling_layer": False} if kind == "swin" else {}
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**fields), **options)


@pytest.mark.parametrize("kind", [*TOWERS, "blip2"])
def test_any_vision_tower_serves(tmp_path, kind):
    tower = tower_of(kind).eval()
    tower.save_pretrained(tmp_path / "vision")
    transformers.BlipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vision")
    _, text = save_parts(tmp_path / "parts", gpt=True)
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(tmp_path / "vision", text)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = model.get_image_features(pixels, torch.tensor([0, 1])).last_hidden_state
        inner = tower if kind in ("siglip", "registers", "swin", "convnext") else tower.vision_model
        expected = inner(pixels).last_hidden_state
    if kind == "convnext":
        expected = expected.flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens, expected[:, {"clip": 1, "blip2": 1, "registers": 5}.get(kind, 0) :])
    make = UniMedProcessor.from_vision_text_pretrained(tmp_path / "vision", text, model)
    if kind not in ("swin", "convnext"):
        counted = UniMedProcessor.from_vision_text_pretrained(tmp_path / "vision", text)
        assert counted.num_image_tokens == make.num_image_tokens
    inputs = make(images=image(), text="what is there ?", task="cls", return_tensors="pt")
    assert logits(model, inputs).isfinite().all()
    model.save_pretrained(tmp_path / "both")
    loaded = UniMedForConditionalGeneration.from_pretrained(tmp_path / "both")
    assert_same_weights(model, loaded)
    torch.testing.assert_close(logits(loaded, inputs), logits(model, inputs))


def test_a_tower_inside_a_vision_language_model(tmp_path):
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=32, patch_size=8)
    whole = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=llama().config)
    ).eval()
    whole.save_pretrained(tmp_path / "llava")
    _, text = save_parts(tmp_path)
    model = UniMedForConditionalGeneration.from_vision_text_pretrained(tmp_path / "llava", text)
    assert_same_weights(model.vision_tower, whole.model.vision_tower)
    weights = load_file(tmp_path / "llava" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.fc1" not in name}
    save_file(kept, tmp_path / "llava" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for its vision tower's .*fc1.bias and 1 more"):
        UniMedForConditionalGeneration.from_vision_text_pretrained(tmp_path / "llava", text)


def test_images_of_another_size_are_interpolated():
    tower = {"vision_config": {"model_type": "vit", **SMALL, "image_size": 32, "patch_size": 8}}
    model = UniMedForConditionalGeneration(UniMedConfig(**tower, text_config=llama().config, image_token_id=96)).eval()
    pixels = torch.randn(1, 3, 64, 64)
    features = model.get_image_features(pixels, torch.tensor([0]), interpolate_pos_encoding=True)
    assert features.pooler_output.shape == (1, 16, 64)
    ids = torch.full((1, 18), model.config.image_token_id)
    ids[0, [0, -1]] = 5
    options = {"pixel_values": pixels, "image_tasks": torch.tensor([0]), "interpolate_pos_encoding": True}
    assert model.generate(ids, **options, **GREEDY).shape == (1, 24)


def test_bitsandbytes_skips_the_connector(tmp_path):
    model = uni_med(small_llama().config)
    model.save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(**NF4, llm_int8_skip_modules=["vision_tower", "lm_head"])
    loaded = UniMedForConditionalGeneration.from_pretrained(tmp_path, quantization_config=nf4)
    kinds = {name: type(p).__name__ for name, p in loaded.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == "Params4bit"} == {
        name for name in kinds if "language_model.model.layers" in name and "proj" in name
    }
    for name, parameter in model.connector.named_parameters():
        assert same_bits(parameter, loaded.connector.get_parameter(name)), name
    loaded.train()
    loaded(**placed(batch(), loaded)).loss.backward()
    assert loaded.connector.experts.up.grad.any()
    expected = logits(model, batch())
    assert 0 < (logits(loaded.eval(), batch()).cpu() - expected).norm() < 0.3 * expected.norm()


def test_the_defaults_are_the_papers_model():
    defaults = UniMedConfig()
    assert defaults.vision_config.model_type == "blip_2_vision_model" and defaults.text_config.model_type == "llama"
    assert (defaults.vision_size, defaults.connector_input_size, defaults.text_config.hidden_size) == (1408, 5632, 4096)
    with torch.device("meta"):
        model = UniMedForConditionalGeneration(defaults)
    experts, router = model.connector.experts, model.connector.router
    assert experts.up.shape == (5, 4096, 5632) and experts.down.shape == (5, 4096, 4096)
    assert model.connector.task_tokens.shape == (5, 5632) and router.out_weight.shape == (5, 4 * 11264)
    assert sum(p.numel() for p in model.language_model.parameters()) == 6_738_415_616
    assert sum(p.numel() for p in model.vision_tower.parameters()) == pytest.approx(986e6, rel=0.01)


@pytest.mark.parametrize(("options", "message"), [
    ({"connector": "moe"}, "connector"),
    ({"router": "softmax"}, "router"),
    ({"router": "hard", "num_experts": 3}, "num_experts=3 is less than the 5 tasks"),
    ({"router": "sparse", "num_experts_per_tok": 6}, "num_experts_per_tok=6 is not within 1…5"),
    ({"router": "sparse", "resampling": "avg_pool", "vision_config": {"model_type": "vit", "hidden_size": 36}}, "of 8"),
    ({"resampling": "avg_pool", "resampling_rate": 3}, "square number of tokens"),
    ({"resampling_rate": 0}, "each must be 1 or more"),
    ({"tasks": ["vqa", "vqa"]}, "each only once"),
    ({"tasks": ["vqa", "qa"]}, "not 'qa', which has no image"),
    ({"vision_config": {"model_type": "efficientnet"}, "router": "sparse"}, "has no hidden_size"),
], ids=str)  # fmt: skip
def test_settings_that_do_not_fit_are_errors(options, message):
    with pytest.raises(Exception, match=message):
        UniMedConfig(**options)


# The pipeline


def test_the_pipeline_answers(tmp_path):
    model = uni_med()
    model.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), UniMedProcessor)
    pipe = pipeline("image-text-to-text", model=str(tmp_path))
    inputs = processor()(images=image(), text="what is there ?", task="cls", return_tensors="pt")
    expected = processor().decode(model.generate(**inputs, max_new_tokens=4)[0, -4:], skip_special_tokens=True)
    image().save(tmp_path / "picture.png")
    prompt = "[INST] <Img><image></Img> [cls] what is there ? [/INST]"
    for picture in (image(), str(tmp_path / "picture.png")):
        answer = pipe(images=picture, text=prompt, max_new_tokens=4, return_full_text=False)
        assert answer[0]["generated_text"].strip() == expected.strip()
    part = {"type": "image", "url": str(tmp_path / "picture.png")}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "[cls] what is there ?"}]}]
    answer = pipe(text=chat, max_new_tokens=4, return_full_text=False)
    assert answer[0]["generated_text"].strip() == expected.strip()
