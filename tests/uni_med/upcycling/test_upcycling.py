"""Uni-Med's connector as an adapter of the vision-language models of Transformers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hosts import adapters_of_transformers, host
from peft import PeftModel, get_peft_model
from tiny_adapters import Hidden
from tiny_models import placed
from tiny_vision_language_models import FAMILIES, IMAGE, batch, build
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import BitsAndBytesConfig, LlavaForConditionalGeneration, Trainer, TrainingArguments

from hf_ext import CMoEConfig, HfExtError
from hf_ext.uni_med.upcycling.layer import MixtureProjector

TASKS = ("vqa", "cls")
MIXED = ["vqa", "cls", "vqa"]
PROJECTOR = "model.multi_modal_projector"


def adapted(model, **options):
    return get_peft_model(model, CMoEConfig(**{"r": 4, "tasks": TASKS} | options)).eval()


def mixtures(model) -> list[MixtureProjector]:
    return [module for module in model.modules() if isinstance(module, MixtureProjector)]


def diverge(model, std: float = 1.0) -> None:
    """Gives each expert a change, as training does."""
    torch.manual_seed(1)
    for mixture in mixtures(model):
        for B in mixture.lora_experts["default"].B:
            nn.init.normal_(B, std=std)


@torch.no_grad()
def logits(model, inputs, **more):
    return model(**placed(inputs, model), **more).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_the_models_own_until_training_moves_it(family, tmp_path):
    model, inputs = build(family)
    expected = logits(model, inputs)
    adapter = adapted(model, target_modules=r".*(language|text)_model.*\.q_proj")
    assert torch.equal(logits(adapter, inputs, tasks=MIXED), expected)

    adapter.train()
    optimizer = torch.optim.SGD([parameter for parameter in adapter.parameters() if parameter.requires_grad], 1.0)
    before = {name: parameter.clone() for name, parameter in adapter.named_parameters() if parameter.requires_grad}
    for _ in range(3):
        adapter(**inputs, labels=inputs["input_ids"], tasks=MIXED).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter.eval()
    still = {name for name, parameter in adapter.named_parameters() if name in before and torch.equal(parameter, before[name])}
    assert not still
    assert any("q_proj.lora_A" in name for name in before) and any("router" in name for name in before)
    trained = logits(adapter, inputs, tasks=MIXED)
    assert not torch.allclose(trained, expected)

    adapter.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(family)[0], tmp_path, adapter_name="other").eval()
    assert torch.equal(logits(loaded, inputs, tasks=MIXED), trained)
    with adapter.disable_adapter():
        assert torch.equal(logits(adapter, inputs, tasks=MIXED), expected)
    unloaded = adapter.unload()
    assert torch.equal(logits(unloaded, inputs), expected)
    assert unloaded.state_dict().keys() == build(family)[0].state_dict().keys()


@pytest.mark.parametrize("family", [*FAMILIES, "llava_next, a sample without image"])
def test_each_sample_has_the_router_of_its_task(family):
    model, inputs = build(family.partition(",")[0])
    if family not in FAMILIES:
        inputs = batch([88, 0, 52], inputs["pixel_values"][1:], image_sizes=inputs["image_sizes"][1:])
    adapter = adapted(model, num_experts=2, router="hard")
    diverge(adapter)
    alone = [logits(adapter, inputs, tasks=[task] * 3) for task in TASKS]
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)
    mixed = logits(adapter, inputs, tasks=torch.tensor([1, 0, 1]))
    for row, task in enumerate((1, 0, 1)):
        torch.testing.assert_close(mixed[row], alone[task][row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llava", "gemma3", "paligemma", "qwen2_vl", "glm4v"])
@pytest.mark.parametrize("router", ["soft", "sparse", "constant"])
def test_the_mixture_is_the_weighted_sum_of_projectors(family, router):
    model, inputs = build(family)
    adapter = adapted(model, router=router, num_experts=3, use_rslora=True)
    diverge(adapter)
    (mixture,) = mixtures(adapter)
    mixture.double()
    experts, tokens, projectors = mixture.lora_experts["default"], [], []
    for expert in range(3):
        projector = copy.deepcopy(mixture.base_layer)
        names = [*mixture.layers.hidden, mixture.layers.output]
        for index, name in enumerate(names):
            change = experts.B[index][expert].T @ experts.A[index][expert] * (8 / 4**0.5)  # lora_alpha / √r
            if mixture.layers.token is None:
                projector.get_submodule(name).weight.data += change
            else:
                projector.get_parameter(name).data += change.T
        projectors.append(projector)
    seen = mixture.layers.token or names[0]
    hook = mixture.base_layer.get_submodule(seen).register_forward_hook(
        lambda module, args, output: tokens.append(output if mixture.layers.token else args[0])
    )
    features = torch.randn({"qwen2_vl": (16, 24), "glm4v": (4, 32)}.get(family, (2, 16, 24)), dtype=torch.float64)
    with torch.no_grad():
        output = mixture(features)
        hook.remove()
        flat = tokens[0].flatten(0, -2)
        weights = mixture.lora_router["default"].weights(flat, -1).double().expand(len(flat), -1)
        assert torch.allclose(weights.sum(1), torch.ones(len(flat), dtype=torch.float64))
        parts = torch.stack([projector(features).flatten(0, -2) for projector in projectors], 1)
    torch.testing.assert_close(output.flatten(0, -2), (weights[:, :, None] * parts).sum(1), rtol=1e-6, atol=1e-6)


def test_unknown_tasks_have_the_mean_of_all():
    model, inputs = build("llava")
    adapter = adapted(model)
    diverge(adapter)
    (mixture,) = mixtures(adapter)
    router = mixture.lora_router["default"]
    nn.init.normal_(router.task_tokens)
    of_task = logits(adapter, inputs, tasks=["vqa"] * 3)
    unknown = logits(adapter, inputs)
    assert torch.equal(unknown, logits(adapter, inputs, tasks=[-1, -1, -1])) and not torch.allclose(unknown, of_task)
    with torch.no_grad():
        router.task_tokens[0] = router.task_tokens.mean(0)
    torch.testing.assert_close(logits(adapter, inputs, tasks=["vqa"] * 3), unknown)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "idefics3"])
def test_generate_takes_tasks_also_with_beams(family):
    model, inputs = build(family)
    adapter = adapted(model, num_experts=2, router="hard")
    diverge(adapter, std=100)

    def scores(tasks):
        options = {"max_new_tokens": 4, "num_beams": 2, "output_scores": True, "return_dict_in_generate": True}
        return adapter.generate(**inputs, tasks=tasks, **options).sequences_scores

    alone = [scores([task] * 3) for task in TASKS]
    torch.testing.assert_close(scores(MIXED), torch.stack([alone[0][0], alone[1][1], alone[0][2]]))
    assert not torch.allclose(alone[0], alone[1])
    images = {name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    features = []
    for task in TASKS:
        scores([task] * 3)
        features.append(adapter.get_image_features(**images).pooler_output)
    assert all(torch.equal(*pair) for pair in zip(*features))  # the tasks of a call end with it


def test_batches_without_images_work_and_unknown_tasks_raise():
    model, inputs = build("llava")
    adapter = adapted(model)
    expected = logits(adapter, inputs, tasks=MIXED)
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    text["input_ids"] = text["input_ids"].masked_fill(text["input_ids"] == IMAGE, 3)
    assert torch.equal(logits(adapter, text, tasks=MIXED), logits(adapter.base_model.model, text))
    four = {name: torch.cat([value, value[:1]]) for name, value in inputs.items()}
    embeds = {"inputs_embeds": adapter.get_input_embeddings()(inputs["input_ids"]), "pixel_values": inputs["pixel_values"]}
    for call, arguments, message in (
        (adapter, {**inputs, "tasks": ["vqa", "caption", "vqa"]}, "no task 'caption', only vqa, cls"),
        (adapter, {**inputs, "tasks": ["vqa", "cls"]}, "2 entries for 3 samples"),
        (adapter, {**inputs, "tasks": "vqa"}, "tasks='vqa' is a single text"),  # of as many letters as samples
        (adapter.generate, {**inputs, "tasks": ["vqa"], "max_new_tokens": 1}, "1 entries for 3 samples"),
        (adapter, {**four, "tasks": ["vqa", "cls"]}, "2 entries for 4 samples"),  # not two beams of each
        (adapter, {**embeds, "tasks": MIXED}, "require input_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**arguments)
    assert torch.equal(logits(adapter, inputs, tasks=MIXED), expected)  # no error leaves a trace


def test_images_that_cannot_be_distinguished_raise():
    model, inputs = build("llava_next")
    adapter = adapted(model)
    for tokens, images, sizes in (
        ([104, 88], slice(None), [0, 2, 1]),
        ([104, 0], [0, 2], [0, 2]),  # as many images as samples, both in the first
    ):
        two = batch(tokens, inputs["pixel_values"][images], image_sizes=inputs["image_sizes"][sizes])
        with pytest.raises(ValueError, match="do not say which sample"):
            adapter(**two, tasks=["vqa", "cls"])


def test_replicas_of_data_parallel_are_refused():
    adapter = adapted(build("llava")[0])
    with pytest.raises(RuntimeError, match="DataParallel"):
        mixtures(adapter)[0]._replicate_for_data_parallel()  # as torch.nn.DataParallel does, which requires two GPUs


def test_projectors_in_four_bits_are_upcycled(tmp_path):
    pytest.importorskip("bitsandbytes")
    model, inputs = build("llava")
    model.save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    quantized = LlavaForConditionalGeneration.from_pretrained(tmp_path, quantization_config=quantization).eval()
    assert type(quantized.model.multi_modal_projector.linear_1).__name__ == "Linear4bit"
    for module in quantized.modules():  # bitsandbytes' layout for CPUs with AVX-512 is for wider layers
        module.support_avx512bf16_for_cpu = False
    inputs = placed(inputs, quantized)
    expected = logits(quantized, inputs)
    adapter = adapted(quantized)
    assert torch.equal(logits(adapter, inputs, tasks=MIXED), expected)
    adapter.train()
    for _ in range(2):
        adapter(**inputs, labels=inputs["input_ids"], tasks=MIXED).loss.backward()
        torch.optim.SGD([p for p in adapter.parameters() if p.requires_grad], 1.0).step()
    assert not torch.allclose(logits(adapter.eval(), inputs, tasks=MIXED), expected)
    constant = adapted(adapter.unload(), router="constant", num_experts=1)
    with pytest.raises(ValueError, match="quantized"):
        constant.merge_and_unload()


def collate(samples):
    tensors = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "tasks"}
    return tensors | {"tasks": [sample["tasks"] for sample in samples]}


def test_trainer_with_gradient_checkpointing(tmp_path):
    model, inputs = build("llava")
    adapter = adapted(model, target_modules=["q_proj"])
    arguments = TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, gradient_checkpointing=True, remove_unused_columns=False,
        learning_rate=1e-2, report_to=[], save_steps=4, disable_tqdm=True,
    )  # fmt: skip
    inputs["labels"] = inputs["input_ids"]
    samples = [{name: value[i] for name, value in inputs.items()} | {"tasks": task} for i, task in enumerate(MIXED)]
    Trainer(adapter, arguments, train_dataset=samples * 2, data_collator=collate).train()
    (mixture,) = mixtures(adapter)
    assert all(B.abs().max() > 0 for B in mixture.lora_experts["default"].B)
    trained = logits(adapter.eval(), inputs, tasks=MIXED)
    loaded = PeftModel.from_pretrained(build("llava")[0].to(adapter.device), tmp_path / "checkpoint-4").eval()
    torch.testing.assert_close(logits(loaded, inputs, tasks=MIXED), trained)


@pytest.mark.parametrize("family, options", [
    ("paligemma", {"router": "constant"}),
    ("gemma3", {"router": "constant"}),
    ("idefics3", {"router": "hard", "tasks": ("vqa",)}),
    ("qwen2_vl", {"num_experts": 1}),
    ("llava", {"router": "hard", "tasks": ("vqa",), "target_modules": ["q_proj"]}),
])  # fmt: skip
def test_a_constant_router_merges(family, options):
    model, inputs = build(family)
    base = copy.deepcopy(model)
    adapter = adapted(model, **options)
    diverge(adapter)
    expected = logits(adapter, inputs)
    adapter.merge_adapter()
    torch.testing.assert_close(logits(adapter, inputs), expected, rtol=1e-4, atol=1e-4)
    adapter.unmerge_adapter()
    torch.testing.assert_close(logits(adapter, inputs), expected, rtol=1e-4, atol=1e-4)
    merged = adapter.merge_and_unload()
    torch.testing.assert_close(logits(merged, inputs), expected, rtol=1e-4, atol=1e-4)
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert not torch.allclose(logits(base, inputs), expected, atol=1e-3)


@pytest.mark.parametrize("family, options, message", [
    ("paligemma", {}, "differ between tokens or tasks"),
    ("idefics3", {"router": "hard"}, "differ between tokens or tasks"),
    ("llava", {"router": "constant"}, "hidden units"),
])  # fmt: skip
def test_other_mixtures_do_not_merge(family, options, message):
    model, inputs = build(family)
    adapter = adapted(model, target_modules=["q_proj"], **options)
    diverge(adapter)
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    before, names = logits(adapter, inputs), adapter.state_dict().keys()
    for merge in (adapter.merge_adapter, adapter.merge_and_unload):
        with pytest.raises(ValueError, match=message):
            merge()
        assert torch.equal(logits(adapter, inputs), before) and adapter.state_dict().keys() == names


def wrap(model, name, wrapper) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, wrapper(model.get_submodule(name)))


COMPILE = partial(torch.compile, backend="eager")
WRAPPED = {
    "checkpointed projector": (PROJECTOR, checkpoint_wrapper),
    "checkpointed layer": ("model.language_model.layers.0", checkpoint_wrapper),
    "compiled projector": (PROJECTOR, COMPILE),
    "compiled layer": ("model.language_model.layers.0", COMPILE),
}


@host("peft>=0.21")  # older ones keep the names of compiled modules
@pytest.mark.parametrize("place", WRAPPED)
def test_wrapped_modules_are_saved_and_loaded(place, tmp_path):
    model, inputs = build("llava")
    adapter = adapted(model, target_modules=["q_proj"])
    diverge(adapter)
    wrap(adapter.base_model.model, *WRAPPED[place])
    expected = logits(adapter, inputs, tasks=MIXED)
    adapter.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("llava")[0], tmp_path).eval()
    assert torch.equal(logits(loaded, inputs, tasks=MIXED), expected)
    diverge(adapter, std=0)
    adapter.load_adapter(tmp_path, "default")
    assert torch.equal(logits(adapter, inputs, tasks=MIXED), expected)


@host("peft>=0.21")
@pytest.mark.parametrize("place", [PROJECTOR, "model.language_model.layers.0"])
def test_an_unknown_wrapper_that_hides_layers_is_an_error(place, tmp_path):
    adapter = adapted(build("llava")[0], target_modules=["q_proj"])
    wrap(adapter.base_model.model, place, Hidden)
    with pytest.raises(HfExtError, match="under a wrapper whose name its state dict leaves out"):
        adapter.save_pretrained(tmp_path)


@pytest.fixture(params=["force_eager", pytest.param("default", marks=pytest.mark.slow)])
def stance(request):
    with torch.compiler.set_stance(request.param):
        yield


@host("peft>=0.21")
def test_a_model_may_be_compiled_before_but_not_compile_its_projector(tmp_path, stance):
    compiled, inputs = COMPILE(build("llava")[0]), build("llava")[1]
    adapter = adapted(compiled)
    diverge(adapter)
    assert adapter.generate(**inputs, tasks=MIXED, max_new_tokens=2).shape[0] == 3
    adapter.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("llava")[0], tmp_path).eval()
    assert torch.equal(logits(loaded, inputs, tasks=MIXED), logits(adapter, inputs, tasks=MIXED))
    model, _ = build("llava")
    wrap(model, PROJECTOR, COMPILE)
    with pytest.raises(ValueError, match="would run without experts, as it was compiled"):
        adapted(model)


def test_a_projector_that_is_computed_again_without_its_tasks_is_refused():
    model, inputs = build("llava")
    adapter = adapted(model)
    wrap(adapter.base_model.model, PROJECTOR, checkpoint_wrapper)
    adapter(**inputs, labels=inputs["input_ids"]).loss.backward()
    loss = adapter(**inputs, labels=inputs["input_ids"], tasks=MIXED).loss
    with pytest.raises(ValueError, match="Leave the projector out"):
        loss.backward()


def test_two_adapters_and_a_copy_compute_apart():
    model, inputs = build("llava")
    adapter = adapted(model)
    adapter.add_adapter("other", CMoEConfig(r=2, num_experts=3, tasks=("a", "b")))
    diverge(adapter)
    first = logits(adapter, inputs, tasks=MIXED)
    adapter.set_adapter("other")
    base = logits(adapter, inputs, tasks=["a", "b", "a"])
    twin = copy.deepcopy(adapter)
    twin.set_adapter("default")
    assert torch.equal(logits(twin, inputs, tasks=MIXED), first)
    assert twin.generate(**inputs, tasks=MIXED, max_new_tokens=2).shape[0] == 3
    assert mixtures(twin)[0].tasks is not mixtures(adapter)[0].tasks
    adapter.set_adapter("default")
    assert torch.equal(logits(adapter, inputs, tasks=MIXED), first) and not torch.equal(first, base)
    with pytest.raises(ValueError, match="set_adapter"):
        adapter(**inputs, adapter_names=["default", "other", "default"])
    adapter.delete_adapter("other")
    assert torch.equal(logits(adapter, inputs, tasks=MIXED), first)


@adapters_of_transformers
def test_add_adapter_of_transformers_takes_it(tmp_path):
    model, inputs = build("qwen2_5_vl")
    expected = logits(model, inputs)
    model.add_adapter(CMoEConfig(r=2, tasks=TASKS))
    assert torch.equal(logits(model, inputs, tasks=MIXED), expected)
    diverge(model)
    changed = logits(model, inputs, tasks=MIXED)
    model.save_pretrained(tmp_path)
    loaded = build("qwen2_5_vl")[0]
    loaded.load_adapter(tmp_path)
    torch.testing.assert_close(logits(loaded.eval(), inputs, tasks=MIXED), changed)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.bridge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.bridge(x)


def test_projectors_of_other_classes_by_name():
    model, x = Plain(), torch.randn(5, 6)
    expected = model(x)
    for options, message in (
        ({}, "no projector of a known class"),
        ({"connectors": ["bridges"]}, "no such module"),
        ({"connectors": ["bridge"], "target_modules": ["depth"]}, "no such modules for LoRA"),
        ({"connectors": ["deep"]}, "3 linear layers"),
    ):
        with pytest.raises(ValueError, match=message):
            get_peft_model(model, CMoEConfig(**options))
    adapter = get_peft_model(model, CMoEConfig(connectors=["bridge"]))
    assert torch.equal(adapter(x), expected)


@pytest.mark.parametrize("options, message", [
    ({"num_experts": 0}, "1 or more"),
    ({"rank_pattern": {"linear_1": 0}}, "1 or more"),
    ({"router": "best"}, "'soft', 'hard'"),
    ({"router_input": "image"}, "'task_token'"),
    ({"tasks": ("a", "a")}, "each name once"),
    ({"tasks": "vqa"}, "tasks='vqa': give a list"),
    ({"connectors": "bridge"}, "connectors='bridge': give a list"),
    ({"router": "hard"}, "requires tasks"),
    ({"router_input": "task"}, "requires tasks"),
    ({"router": "hard", "tasks": ("a", "b"), "num_experts": 1}, "less than the 2 tasks"),
    ({"router": "sparse", "num_experts_per_tok": 6}, "within 1…5"),
])  # fmt: skip
def test_invalid_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        CMoEConfig(**options)
