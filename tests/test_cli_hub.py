"""Commands read models from the Hub by their ids."""

import json

from local_hub import LocalHub
from tiny_checkpoints import contents, pair
from tiny_merges import write_tasks
from tiny_transfers import save_files

from hf_ext import emr, fm_delta

SCRIPT = """
import sys
from huggingface_hub import HfApi
from hf_ext.cli.main import main

def push(folder, name):
    HfApi().create_repo(f"user/{name}", exist_ok=True)
    HfApi().upload_folder(repo_id=f"user/{name}", folder_path=folder)

for folder in ("base", "tuned", "tasks/base", "tasks/trec", "tasks/cr", "moves/source", "moves/adapter", "moves/target"):
    push(folder, folder.replace("/", "-"))
commit = HfApi().model_info("user/base").sha
local = f"--base base --base-id user/base --revision {commit}"
lines = f'''
    find-base user/tuned user/base
    compress user/tuned --base user/base --out small
    compress tuned {local} --out local
    merge --base user/tasks-base --task trec=user/tasks-trec --task cr=user/tasks-cr --method emr --out merged
'''
assert [main(line.split()) for line in lines.strip().splitlines()] == [0, 0, 0, 0]
push("small", "small")
push("merged", "merged")
lines = '''
    inspect user/small
    verify user/small
    decompress user/small --out back
    inspect user/merged
    verify user/merged
    extract user/merged --task cr --out extracted
    add-task user/merged --task more=user/tasks-cr --out more
    remove-task more --task cr --out fewer
'''
of_a_training = "--use-cpu --report-to none --save-strategy no --num-train-epochs 1 --num-samples 8 --filter none"
asked = "--prompt-template {input} --teacher-prompt-template {input} --max-label-length 4"
models = "--source-model user/moves-source --source-adapter user/moves-adapter --target-model user/moves-target"
lines += f"    transfer {models} --seeds moves/seeds.jsonl --out moved {of_a_training} {asked}"
assert [main(line.split()) for line in lines.strip().splitlines()] == 9 * [0]
print(commit)
"""


def test_every_command_takes_hub_ids(tmp_path):
    pair(tmp_path)
    write_tasks(tmp_path / "tasks", {"trec": 6, "cr": 2})
    save_files(tmp_path / "moves")
    with LocalHub() as hub:
        commit = hub.run(tmp_path, SCRIPT).splitlines()[-1]
    for folder in ("small", "local"):  # a local copy of the base is recorded by its id and commit
        report = fm_delta.inspect(tmp_path / folder)
        assert (report.base, report.revision) == ("user/base", commit)
    assert contents(tmp_path / "back").items() >= contents(tmp_path / "tuned").items()
    assert not any(path.is_symlink() for path in tmp_path.glob("[!h]*/**/*"))
    assert [task.task for task in emr.report(tmp_path / "more").tasks] == ["trec", "cr", "more"]
    assert (tmp_path / "extracted/model.safetensors").exists()
    adapter = json.loads((tmp_path / "moved/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "user/moves-target"
