"""What is pushed to the Hub has the card that was saved, which the Hub accepts; a card that a user wrote there stays."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard
from local_hub import LocalHub
from processes import python
from valid_cards import valid_card

PUSH = """
import hf_ext
from huggingface_hub import HfApi, hf_hub_download
from hf_ext import emr, fm_delta
from tiny_models import bert, perturb
from tiny_uni_med import uni_med
from transformers import AutoModelForSequenceClassification

def write_card(repository):
    text = b"---\\nlicense: mit\\n---\\n\\nMy own words.\\n"
    HfApi().upload_file(path_or_fileobj=text, path_in_repo="README.md", repo_id=repository)

bert().push_to_hub("user/base")
write_card("user/base")
hf_hub_download("user/base", "README.md")
for seed in (1, 2):
    perturb(bert(), seed).push_to_hub(f"user/tuned-{seed}")
emr.merge("user/base", {"one": "user/tuned-1", "two": "user/tuned-2"}, "merged")
models = {
    "fm_delta": fm_delta.enable(perturb(bert(), 3), "user/base"),
    "emr": AutoModelForSequenceClassification.from_pretrained("merged"),
    "uni_med": uni_med(),
}
for name, model in models.items():
    model.add_model_tags("tiny")
    model.push_to_hub(f"user/{name}", private=True)
    model.save_pretrained(f"here-{name}", push_to_hub=True, repo_id=f"user/saved-{name}")
    write_card(f"user/{name}")
    model.push_to_hub(f"user/{name}")
    model.save_pretrained(f"there-{name}", push_to_hub=True, repo_id=f"user/{name}")
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards")
    with LocalHub() as hub:
        env = hub.client_env(folder / "home")
        done = python("-c", PUSH, env=env, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return hub.repos


@pytest.mark.parametrize("kind", ["fm_delta", "emr", "uni_med"])
def test_what_is_pushed_has_its_own_card(repositories, tmp_path, kind):
    first = list(repositories[f"user/{kind}"].commits.values())[1]  # after the one that makes the repository
    for files in (first.files, repositories[f"user/saved-{kind}"].at("main").files):
        (tmp_path / "README.md").write_bytes(files["README.md"].content)
        data, _ = valid_card(tmp_path, kind)
        assert "tiny" in data.tags
        if kind == "fm_delta":
            assert (data.base_model, data["base_model_relation"], data.license) == ("user/base", "finetune", "mit")
        if kind == "emr":
            assert data.base_model == ["user/base", "user/tuned-1", "user/tuned-2"]
            assert data["base_model_relation"] == "merge"


@pytest.mark.parametrize("kind", ["fm_delta", "emr", "uni_med"])
def test_a_card_that_a_user_wrote_on_the_hub_stays(repositories, kind):
    repository = repositories[f"user/{kind}"]
    card = ModelCard(repository.at("main").files["README.md"].content.decode())
    assert "My own words." in card.text and "hf_ext" not in card.text and card.data.license == "mit"
    assert repository.private and len(repository.commits) >= 3
