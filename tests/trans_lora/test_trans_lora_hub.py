"""A discriminator and a transferred adapter go to the Hub by the usual calls, and load from it by id."""

from local_hub import LocalHub
from processes import python

PUSH = """
import json
from pathlib import Path
import torch
from hf_ext.cli.main import main
from peft import PeftModel
from tiny_transfers import SEEDS, inputs, is_input, lora, pretrained, settings, teacher
from hf_ext import TransLoraTrainer
from hf_ext.trans_lora import Discriminator, load_model, train_discriminator
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
for kind in ("gpt2", "llama"):
    model, tokenizer = pretrained(kind)
    model.push_to_hub(f"user/{kind}")
    tokenizer.push_to_hub(f"user/{kind}")
(source, source_tokenizer), (target, tokenizer) = load_model("user/gpt2"), load_model("user/llama")
made = train_discriminator(
    source, source_tokenizer, inputs(12, 3), task="pick", args=settings("d"), peft_config=lora("gpt2"), seeds=SEEDS
)
made.push_to_hub("user/discriminator", private=True)
made.save_pretrained("saved", push_to_hub=True, repo_id="user/saved")
loaded = Discriminator.from_pretrained("user/discriminator")
assert all(abs(a - b) < 1e-5 for a, b in zip(loaded.score(SEEDS), made.score(SEEDS))) and loaded.task == "pick"

adapter, _ = teacher("gpt2")
adapter.push_to_hub("user/adapter")
trainer = TransLoraTrainer(
    target,
    settings("t", filter="none", num_samples=8, num_train_epochs=1, hub_model_id="user/moved"),
    processing_class=tokenizer,
    teacher=PeftModel.from_pretrained(load_model("user/gpt2")[0], "user/adapter"),
    teacher_processing_class=source_tokenizer,
    seeds=SEEDS,
    peft_config=lora("llama"),
    well_formed=is_input,
)
trainer.train()
trainer.push_to_hub()
again = PeftModel.from_pretrained(load_model("user/llama")[0], "user/moved")
same = dict(again.named_parameters())
assert all(torch.equal(p, same[name]) for name, p in trainer.model.named_parameters())

Path("seeds.jsonl").write_text("".join(json.dumps(seed) + "\\n" for seed in SEEDS))
line = "transfer --source-model user/gpt2 --source-adapter user/adapter --target-model user/llama --seeds seeds.jsonl --out cli"
line += " --filter none --num-samples 8 --max-label-length 4 --num-train-epochs 1 --use-cpu --report-to none --save-strategy no"
line += " --prompt-template {input} --teacher-prompt-template {input}"
assert main(line.split()) == 0
Discriminator.from_pretrained("user/nothing")
"""


def test_pushed_adapters_load_by_id_and_missing_ones_are_named(tmp_path):
    with LocalHub() as hub:
        env = hub.client_env(tmp_path)
        result = python("-c", PUSH, env=env, cwd=tmp_path)
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("hf_ext.errors.HfExtError: 'user/nothing' is neither a folder nor"), result.stderr[-3000:]
        files = {repo: hub.repos[f"user/{repo}"].at("main").files for repo in ("discriminator", "saved", "moved")}
        assert hub.repos["user/discriminator"].private
    for repo in ("discriminator", "saved"):
        assert {*files[repo]} - {".gitattributes"} == {
            *("README.md", "adapter_config.json", "adapter_model.safetensors", "discriminator.json")
        }
        assert b"base_model: user/gpt2" in files[repo]["README.md"].content
    card = files["moved"]["README.md"].content
    assert b"base_model: user/llama" in card and b"inputs written" in card and "synthesis.jsonl" in files["moved"]
