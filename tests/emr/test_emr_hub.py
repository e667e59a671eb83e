"""A merge goes to the Hub by the usual calls, with all tasks, and loads from it by id."""

from __future__ import annotations

from local_hub import LocalHub

WORK = """
import logging
import sys
from pathlib import Path
from tiny_checkpoints import contents
from tiny_merges import classifier, tensors_of, write_tasks
from tiny_models import assert_same_weights, bert, tokenizer
from transformers import AutoModelForSequenceClassification as Auto, AutoTokenizer
from hf_ext import emr
"""

PUSH = """
base, tasks = write_tasks(Path("in"))
bert().bert.push_to_hub("user/base")
for task in ("cr", "subj"):
    Auto.from_pretrained(tasks[task]).push_to_hub(f"user/{task}")
    tokenizer().push_to_hub(f"user/{task}")
emr.merge("user/base", {"trec": tasks["trec"], "cr": "user/cr", "subj": "user/subj"}, "elected", method="emr")
emr.add_task("elected", {"sst2": tasks["sst2"]}, "merged", method="switch", bits=6)
emr.extract("merged", "sst2", "merged-sst2")
emr.merge(base, {task: tasks[task] for task in ("trec", "cr", "subj")}, "local", method="emr")
for task in ("trec", "cr", "subj"):
    for folder in ("merged", "local"):
        emr.extract(folder, task, f"{folder}-{task}")
    assert contents(Path(f"merged-{task}"))["model.safetensors"] == contents(Path(f"local-{task}"))["model.safetensors"]
model = Auto.from_pretrained("merged")
model.set_task("cr")
model.push_to_hub("user/merge")
model.save_pretrained("saved", push_to_hub=True, repo_id="user/saved")
print("of a local base:")
logging.getLogger("hf_ext").addHandler(logging.StreamHandler(sys.stdout))
Auto.from_pretrained("local").push_to_hub("user/local")
"""

LOAD = """
for name in ("user/merge", "user/saved"):
    model = Auto.from_pretrained(name)
    assert model.active_task == "trec" and model.tasks == ["trec", "cr", "subj", "sst2"]
    for task in model.tasks:
        model.set_task(task)
        assert_same_weights(model, Auto.from_pretrained(f"../push/merged-{task}"))
    model.save_pretrained("again")
    there, here = contents(Path("../push/merged")), contents(Path("again"))
    assert {path: here[path] for path in there} == there, there.keys() ^ here.keys()
"""

PARTS = """
from huggingface_hub import HfApi, hf_hub_download
HfApi().create_repo("user/many")
HfApi().upload_folder(repo_id="user/many", folder_path="../push/merged", path_in_repo="inside")
model = Auto.from_pretrained("user/many", subfolder="inside")
model.set_task("subj")
assert_same_weights(model, Auto.from_pretrained("../push/merged-subj"))
# A snapshot of which only a part was downloaded is completed.
config = Path(hf_hub_download("user/merge", "task-cr/config.json"))
config.unlink()
model = Auto.from_pretrained("user/merge")
model.set_task("cr")
assert_same_weights(model, Auto.from_pretrained("../push/merged-cr"))
emr.extract("user/merge", "cr", "extracted")
assert contents(Path("extracted")) == contents(Path("../push/merged-cr"))
"""

PRIVATE = """
try:
    Auto.from_pretrained("user/gone")
except OSError as error:
    print(type(error).__name__)
try:
    emr.merge("user/base", {"a": "user/gone"}, "merged")
except emr.merge.__globals__["CheckpointError"] as error:
    print(error)
assert not Path("merged").exists()
"""


ADAPTER = """
from peft import LoraConfig, get_peft_model
from hf_ext.adapters.adapter_source import AdapterSource
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.hub import Hub
get_peft_model(classifier(2, 4), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")).save_pretrained("adapter")
base = Checkpoint("user/base", hub=Hub(token="hf_local", cache_dir="elsewhere"))
assert AdapterSource(Path("adapter"), base).config.model_type == "bert"
"""


def test_a_merge_is_pushed_and_loaded_by_id(tmp_path):
    with LocalHub() as hub:
        before, after = hub.run(tmp_path / "push", WORK + PUSH).split("of a local base:")
        assert "is a local folder" in after and "is a local folder" not in before
        hub.run(tmp_path / "load", WORK + LOAD)
        hub.run(tmp_path / "parts", WORK + PARTS)
        printed = hub.run(tmp_path / "gone", WORK + PRIVATE)
        hub.repos["user/base"].private = True
        hub.run(tmp_path / "token", WORK + ADAPTER, signed_in=False)
        assert "user/gone' is neither a folder nor a Hub repository that can be reached" in printed
