"""Checkpoints laid out as the authors' code writes them become models that compute the same."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from tiny_uni_med import batch, save_parts
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_ext import CheckpointError, CorruptFileError
from hf_ext.cli.main import main
from hf_ext.uni_med import convert_checkpoint

TASKS = ["vqa", "refer", "identify", "caption", "cls"]
VISION, TEXT, RATE, EXPERTS, RANK = 32, 64, 4, 3, 2
SETTINGS = {
    "resample_rate": RATE,
    "resample_method": "projection",
    "has_moe": True,
    "projector_type": "moe_mlp",
    "num_experts": EXPERTS,
    "router_method": "router_task_token",
    "router_type": "soft",
    "num_task_tokens": 1,
    "task_token_c": 24,
    "lora_alpha": 6,
}


class Layout(nn.Module):
    """The trained parts under the names they have in the authors' model."""

    def __init__(self, settings):
        super().__init__()
        torch.manual_seed(3)
        size = VISION * (RATE if settings["resample_method"] == "projection" else 1)
        task = settings["task_token_c"]
        self.task_tokens = nn.ParameterDict({name: nn.Parameter(torch.randn(1, 1, task)) for name in TASKS})
        self.moe_layers = nn.ModuleDict()
        kind = settings["projector_type"]
        if kind.startswith("moe"):
            for e in range(settings["num_experts"]):
                layers = [nn.Linear(size, TEXT)] + ([nn.GELU(), nn.Linear(TEXT, TEXT)] if kind == "moe_mlp" else [])
                self.moe_layers[str(e)] = nn.ModuleList(layers)
            inputs = {"router_task_token": size + task, "router_token": size, "router_task": task}[settings["router_method"]]
            self.router = nn.Module()
            self.router.fc1, self.router.fc2 = nn.Linear(inputs, 4 * inputs), nn.Linear(4 * inputs, settings["num_experts"])
            self.llm_proj = self.moe_layers
        elif kind == "linear":
            self.llm_proj = nn.Linear(size, TEXT)
        else:
            self.llm_proj = nn.Sequential(nn.Linear(size, TEXT), nn.GELU(), nn.Linear(TEXT, TEXT))

    def project(self, tokens: torch.Tensor, task: str, settings) -> torch.Tensor:
        """Returns the embeddings of one image: (32, 32) visual tokens of a grid of 4 x 8."""
        if settings["resample_method"] == "projection":
            x = tokens.reshape(-1, VISION * RATE)
        else:
            pool = {"avgpool": F.avg_pool2d, "maxpool": F.max_pool2d}[settings["resample_method"]]
            x = pool(tokens.T.reshape(1, VISION, 4, 8), 2)[0].flatten(1).T
        if not settings["projector_type"].startswith("moe"):
            return self.llm_proj(x)
        parts = {"router_task_token": [True, True], "router_token": [False, True], "router_task": [True, False]}
        with_task, with_token = parts[settings["router_method"]]
        mixed = ([self.task_tokens[task][0].expand(len(x), -1)] if with_task else []) + ([x] if with_token else [])
        logits = self.router.fc2(F.gelu(self.router.fc1(torch.cat(mixed, 1))))
        if settings["router_type"] == "soft":
            weights = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
        elif settings["router_type"] == "constant":
            weights = torch.full_like(logits, 1 / logits.shape[1])
        elif settings["router_type"] == "hard":
            weights = F.one_hot(torch.tensor(TASKS.index(task)), logits.shape[1]).expand_as(logits).float()
        else:
            top, chosen = logits.topk(settings.get("sparse_topk", 2))
            weights = torch.full_like(logits, -torch.inf).scatter(1, chosen, top).softmax(1)
        out = 0
        for e, layers in self.llm_proj.items():
            value = x
            for layer in layers:
                value = layer(value)
            out = out + weights[:, int(e), None] * value
        return out


def lora() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    factors = {}
    for layer in range(2):
        for name, (m, n) in {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "mlp.down_proj": (64, 96)}.items():
            prefix = f"llm_model.base_model.model.model.layers.{layer}.{name}"
            factors[f"{prefix}.lora_A.default.weight"] = torch.randn(RANK, n)
            factors[f"{prefix}.lora_B.default.weight"] = torch.randn(m, RANK)
    return factors


def checkpoint(path, settings, state=None):
    layout = Layout(settings)
    tensors = layout.state_dict() if state is None else state
    torch.save({"model": tensors, "config": {"model": settings}, "optimizer": {"state": {}}, "epoch": 0}, path)
    return layout


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"router_type": "sparse"},
        {"router_type": "constant"},
        {"router_type": "hard", "num_experts": 5},
        {"router_method": "router_token"},
        {"router_method": "router_task", "resample_method": "maxpool"},
        {"projector_type": "moe_linear", "resample_method": "avgpool"},
        {"projector_type": "linear"},
        {"projector_type": "mlp2x_gelu"},
    ],
    ids=str,
)
def test_a_converted_connector_computes_what_the_original_does(tmp_path, change):
    settings = SETTINGS | change
    vision, text = save_parts(tmp_path)
    layout = checkpoint(tmp_path / "checkpoint_0.pth", settings)
    convert_checkpoint(tmp_path / "checkpoint_0.pth", tmp_path / "out", vision, text)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    inputs = batch()
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"], inputs["image_tasks"])
        for tokens, task, embeddings in zip(features.last_hidden_state, inputs["image_tasks"], features.pooler_output):
            expected = layout.project(tokens, TASKS[task], settings)
            torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)


def test_the_lora_is_an_adapter_of_peft(tmp_path, capsys):
    vision, text = save_parts(tmp_path)
    factors = lora()
    buffers = {"llm_model.base_model.model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    checkpoint(tmp_path / "c.pth", SETTINGS, Layout(SETTINGS).state_dict() | factors | buffers)
    command = [
        "convert-uni-med",
        str(tmp_path / "c.pth"),
        "--out",
        str(tmp_path / "out"),
        "--vision",
        str(vision),
        "--text",
        str(text),
    ]
    assert main(command) == 0
    assert "LoRA of rank 2 on 6 layers is in" in capsys.readouterr().out
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    expected = {name: p.clone() for name, p in base.language_model.named_parameters()}
    merged = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").merge_and_unload()
    for name, weight in merged.language_model.named_parameters():
        key = f"llm_model.base_model.model.{name.removesuffix('.weight')}.lora_"
        change = 0
        if f"{key}A.default.weight" in factors:
            change = 6 / RANK * factors[f"{key}B.default.weight"] @ factors[f"{key}A.default.weight"]
        torch.testing.assert_close(weight, expected[name] + change, rtol=1e-4, atol=1e-4)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert processor.num_image_tokens == 8 and processor.prompt_format == "authors"


def test_a_checkpoint_without_settings_has_the_papers(tmp_path):
    vision, text = save_parts(tmp_path)
    torch.save({"model": Layout(SETTINGS).state_dict()}, tmp_path / "c.pth")
    conversion = convert_checkpoint(tmp_path / "c.pth", tmp_path / "out", vision, text)
    assert conversion.options == {
        "resampling": "projection", "resampling_rate": 4, "connector": "moe_mlp", "num_experts": 3, "router": "soft",
        "num_experts_per_tok": 2, "router_input": "task_token", "task_token_size": 24,
    }  # fmt: skip
    assert conversion.lora is None and not (tmp_path / "out" / "adapter").exists()


class Evil:
    def __reduce__(self):
        return print, ("code that ran from a checkpoint",)


@pytest.fixture
def refuses(tmp_path):
    """Checks that a checkpoint is an error and that nothing is written."""
    vision, text = save_parts(tmp_path)

    def refuses(error, message, tensors=None, settings=SETTINGS, path=tmp_path / "c.pth"):
        if tensors is not None:
            torch.save({"model": tensors, "config": {"model": settings}}, path)
        with pytest.raises(error, match=message):
            convert_checkpoint(path, tmp_path / "out", vision, text)
        assert not (tmp_path / "out").exists()

    return refuses


def test_checkpoints_of_other_models_are_errors(refuses):
    state = Layout(SETTINGS).state_dict()

    def without(end: str) -> dict:
        return {name: tensor for name, tensor in state.items() if end not in name}

    def changed(end: str, change) -> dict:
        return {name: change(tensor) if name.endswith(end) else tensor for name, tensor in state.items()}

    deeper = {f"moe_layers.{i}.4.weight": torch.ones(64, 64) for i in range(3)}
    deeper |= {f"moe_layers.{i}.4.bias": torch.ones(64) for i in range(3)}
    factors = lora()
    name, last = next(iter(factors)), next(key for key in factors if "1.mlp.down_proj.lora_A" in key)
    ranks = factors | {last: torch.ones(3, 96), last.replace("_A", "_B"): torch.ones(64, 3)}
    for message, tensors in (
        ("1 unknown tensors, such as visual_encoder.x", state | {"visual_encoder.x": torch.ones(3)}),
        ("lacks the router, or part of it: it has fc1.weight", without("router.fc2")),
        ("lacks llm_proj.1.2.bias", without(".1.2.bias")),
        ("one task token of each", without("task_tokens.cls")),
        ("one task token of each", state | {"task_tokens.cls": torch.ones(1, 1, 3)}),
        ("no supported connector", {"llm_proj.weight": torch.ones(64, 128)}),
        ("no supported connector", {"router.fc1.weight": state["router.fc1.weight"]}),
        ("no supported connector", state | deeper),
        (r"connector.experts.up is \(3, 64, 100\) there, and \(3, 64, 128\)", changed("0.weight", lambda x: x[:, :100])),
        (r"llm_proj.2.0.bias has shape \(3,\), and that of expert 0 \(64,\)", changed(".2.0.bias", lambda x: x[:3])),
        ("B and A of language_model.model.layers.0.self_attn.q_proj", state | factors | {name: torch.ones(2, 3)}),
        (r"are \(64, 3\) and \(3, 96\); its weight is \(64, 96\), the rank 2", state | ranks),
    ):
        refuses(CheckpointError, message, tensors)
    for message, settings in (
        ("settings that do not fit together", {"router_type": "foo"}),
        (r"router_method=\['x'\]", {"router_method": ["x"]}),
        ("resample_method='cnn'", {"resample_method": "cnn"}),
    ):
        refuses(CheckpointError, message, state, SETTINGS | settings)


def test_files_that_are_no_checkpoints_are_errors(refuses, tmp_path, capsys):
    state = Layout(SETTINGS).state_dict()
    unreadable = "is not a checkpoint that torch.load can read .*; give the .pth of Uni-Med's authors"
    for words in ("not a checkpoint", "everything else", ""):
        (tmp_path / "text.pth").write_text(words)
        refuses(CorruptFileError, f"text.pth {unreadable}", path=tmp_path / "text.pth")
    refuses(CheckpointError, "none.pth cannot be read", path=tmp_path / "none.pth")
    refuses(CorruptFileError, "no dict 'model'", path=_saved(tmp_path / "list.pth", [torch.ones(2)]))
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    refuses(CorruptFileError, unreadable, path=tmp_path / "evil.pth")
    refuses(CorruptFileError, unreadable, path=_saved(tmp_path / "evil2.pth", {"model": Evil()}))
    assert "code that ran" not in capsys.readouterr().out
    name = next(iter(lora()))
    refuses(CorruptFileError, "does not hold floats", state | {name: torch.ones(2, 64, dtype=torch.int8)})
    flat = state | {"router.fc1.weight": torch.ones(4)}
    refuses(CorruptFileError, r"router.fc1.weight has shape \(4,\), and 2 dimensions", flat)
    refuses(CorruptFileError, "resample_rate='4'", state, SETTINGS | {"resample_rate": "4"})


def test_old_formats_load_and_old_adapters_are_removed(tmp_path):
    vision, text = save_parts(tmp_path)
    checkpoint(tmp_path / "c.pth", SETTINGS, Layout(SETTINGS).state_dict() | lora())
    convert_checkpoint(tmp_path / "c.pth", tmp_path / "out", vision, text)
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()
    torch.save({"model": Layout(SETTINGS).state_dict()}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert convert_checkpoint(tmp_path / "old.pth", tmp_path / "out", vision, text).lora is None
    assert not (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()


def _saved(path, value):
    torch.save(value, path)
    return path
