"""A pushed model has its card, with the model's tags; a card in the repository stays."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard
from local_hub import LocalHub
from valid_cards import valid_card

PUSH = """
import hf_ext
from huggingface_hub import HfApi
from hf_ext import emr, fm_delta
from tiny_models import bert, perturb
from transformers import AutoModelForSequenceClassification

bert().push_to_hub("user/base")
for seed in (1, 2):
    perturb(bert(), seed).push_to_hub(f"user/tuned-{seed}")
emr.merge("user/base", {"one": "user/tuned-1", "two": "user/tuned-2"}, "merged")
models = {
    "fm_delta": fm_delta.enable(perturb(bert(), 3), "user/base"),
    "emr": AutoModelForSequenceClassification.from_pretrained("merged"),
}
for name, model in models.items():
    model.add_model_tags("tiny")
    model.push_to_hub(f"user/{name}", private=True, tags="mine")
    model.save_pretrained(f"here-{name}", push_to_hub=True, repo_id=f"user/saved-{name}")
    HfApi().upload_file(path_or_fileobj=b"# Mine", path_in_repo="README.md", repo_id=f"user/{name}")
    model.push_to_hub(f"user/{name}")
    model.save_pretrained(f"there-{name}", push_to_hub=True, repo_id=f"user/{name}")
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards")
    with LocalHub() as hub:
        hub.run(folder, PUSH)
        return hub.repos


@pytest.mark.parametrize("kind", ["fm_delta", "emr"])
def test_a_pushed_model_has_its_card_and_a_card_in_the_repository_stays(repositories, tmp_path, kind):
    repository = repositories[f"user/{kind}"]
    first = list(repository.commits.values())[1]  # after the one that makes the repository
    for files, tags in ((first.files, {"tiny", "mine"}), (repositories[f"user/saved-{kind}"].at("main").files, {"tiny"})):
        (tmp_path / "README.md").write_bytes(files["README.md"].content)
        data, _ = valid_card(tmp_path)
        assert tags < {*data.tags}
        assert data.base_model == ("user/base" if kind == "fm_delta" else ["user/base", "user/tuned-1", "user/tuned-2"])
    assert ModelCard(repository.at("main").files["README.md"].content.decode()).text == "# Mine"
    assert repository.private and len(repository.commits) >= 3
