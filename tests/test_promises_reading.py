"""Whatever is stored, and whoever reads it: damage and a wrong base are one error that says what is wrong. Nothing is changed
or written then: no file, and no weight of a model in memory."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import contents, edit_settings, flip_bit, weights
from tiny_merges import METHODS, classifier, write_tasks
from tiny_models import perturb, same_bits
from transformers import AutoModel, AutoModelForSequenceClassification, BitsAndBytesConfig

from hf_ext import HfExtError, emr, fm_delta
from hf_ext.serving.stored_models import StoredModel, read_tensors
from hf_ext.storage.decoded import FOLDER

pytestmark = pytest.mark.usefixtures("no_progress_bars")
load = AutoModelForSequenceClassification.from_pretrained
SIZE = "100KB"  # of shards: the weights are two


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A base and two fine-tunes, `cr` compressed in two shards, `trec` compressed against that, both merged, and each of these
    of another save: as `again-…`."""
    place = tmp_path_factory.mktemp("stored") / "before"
    base, tasks = write_tasks(place, {"trec": 6, "cr": 2})
    for again, seed in (("", 2), ("again-", 9)):
        classifier(2, seed).save_pretrained(tasks["cr"], max_shard_size=SIZE)
        (tasks["cr"] / "model.safetensors").unlink(missing_ok=True)
        fm_delta.compress_checkpoint(tasks["cr"], base, place / f"{again}small")
        for method, options in METHODS.items():
            emr.merge(base, tasks, place / f"{again}{method}", **options)
        if not again:
            fm_delta.compress_checkpoint(tasks["trec"], place / "small", place / "next")
    return place.rename(place.with_name("moved"))  # so that no base is found where it was


# ---- readers ---------------------------------------------------------------------------------------------------------

Reader = Callable[[Path, Path], object]  # of the folder with all forms, with a place to write to


def read_all(place: Path, out: Path) -> None:
    with fm_delta.open(place / "small") as checkpoint:
        for name in checkpoint.keys():
            checkpoint.get_tensor(name)


def change(model: torch.nn.Module, work: Callable[[], object]) -> None:
    """Changes a model. If that fails, its weights are the same bits as before, unless the error says that they are not."""
    before = deepcopy(model.state_dict())
    try:
        work()
    except HfExtError as error:
        after = model.state_dict()
        assert "now a mix of both" in str(error) or all(same_bits(after[name], before[name]) for name in before)
        raise


def switch(place: Path, out: Path) -> None:
    model = classifier(2, 5)
    change(model, lambda: fm_delta.switch(model, place / "small"))


def set_task(method: str, place: Path, out: Path) -> None:
    model = load(place / method)
    change(model, lambda: model.set_task("cr"))


def keep_decoded(place: Path, out: Path) -> None:
    with mock.patch.dict(os.environ, {FOLDER: str(place.parent / "decoded")}):
        load(place / "small")


def serve(name: str, place: Path, out: Path) -> None:
    source = StoredModel.named(f"{place}/{name}").open()
    for _ in read_tensors(source, source.names()):
        pass


COMPRESSED: dict[str, Reader] = {
    "from_pretrained": lambda place, out: load(place / "small"),
    "kept decoded": keep_decoded,
    "decompress": lambda place, out: fm_delta.decompress_checkpoint(place / "small", out),
    "verify": lambda place, out: fm_delta.verify(place / "small"),
    "verify, base given": lambda place, out: fm_delta.verify(place / "small", base=place / "base"),
    "inspect": lambda place, out: fm_delta.inspect(place / "small"),
    "open": read_all,
    "switch": switch,
    "enable": lambda place, out: fm_delta.enable(classifier(2, 5), place / "small").save_pretrained(out),
    "as a base": lambda place, out: fm_delta.decompress_checkpoint(place / "next", out),
    "compress against": lambda place, out: fm_delta.compress_checkpoint(place / "trec", place / "small", out),
    "merge": lambda place, out: emr.merge(place / "base", {"cr": place / "small"}, out, method="emr"),
    "extract_lora": lambda place, out: fm_delta.extract_lora(place / "small", place / "base", out, rank=2),
    "serve": partial(serve, "small"),
}
if find_spec("bitsandbytes"):
    NF4 = BitsAndBytesConfig(load_in_4bit=True)
    COMPRESSED["quantize"] = lambda place, out: load(place / "small", quantization_config=NF4)


def readers_of(merge: str) -> dict[str, Reader]:
    return {
        "from_pretrained": lambda place, out: load(place / merge),
        "set_task": partial(set_task, merge),
        "extract": lambda place, out: emr.extract(place / merge, "cr", out),
        "verify": lambda place, out: emr.verify(place / merge),
        "report": lambda place, out: emr.report(place / merge),
        "add_task": lambda place, out: emr.add_task(place / merge, {"more": place / "trec"}, out, accept_conflicts=True),
        "remove_task": lambda place, out: emr.remove_task(place / merge, "trec", out),
        "serve": partial(serve, f"{merge}#cr"),
    }


READERS = {"small": COMPRESSED} | {method: readers_of(method) for method in METHODS}


def answers(form: str, place: Path) -> dict[str, str]:
    """What each reader of a form raises: its error, or "nothing"."""
    raised, before, out = {}, contents(place), place.parent / "out"
    for name, read in READERS[form].items():
        raised[name] = "nothing"
        try:
            read(place, out)
        except (HfExtError, OSError, KeyError, ValueError) as error:  # the others are of Transformers, which reads first
            raised[name] = f"{type(error).__name__}: {error}"
            assert not out.exists(), name
        shutil.rmtree(out, ignore_errors=True)
    assert contents(place) == before
    return raised


# ---- what is wrong ---------------------------------------------------------------------------------------------------

SHARD, INDEX, WEIGHTS = "model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors"
MODULATORS, CONFIG, TASK_CONFIG = "task-cr/modulators.safetensors", "config.json", "task-cr/config.json"
BASE = "../base/model.safetensors"


def flip_header(path: Path) -> None:
    flip_bit(path, 100 / path.stat().st_size)


def flip(place: float) -> Callable[[Path], None]:
    return lambda path: flip_bit(path, place)


def cut(share: float) -> Callable[[Path], None]:
    """Cuts a file, at least by a byte."""
    return lambda path: os.truncate(path, int(share * (path.stat().st_size - 1)))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))


def replace(path: Path) -> None:
    """Takes the file of another save."""
    folder = next(parent for parent in path.parents if parent.name in READERS)
    shutil.copy(folder.parent / f"again-{folder.name}" / path.relative_to(folder), path)


def unlist(path: Path) -> None:
    """Removes a shard, and its tensors from the index."""
    path.unlink()
    index = path.parent / INDEX
    record = json.loads(index.read_text())
    record["weight_map"] = {name: file for name, file in record["weight_map"].items() if file != path.name}
    index.write_text(json.dumps(record))


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def settings(**changes: object) -> Callable[[Path], None]:
    return lambda path: edit_settings(path.parent, **changes)


def take_task(path: Path) -> None:
    """Takes the file of another task of this merge."""
    shutil.copy(path.parents[1] / "task-trec" / path.name, path)


def later_version(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b'\\"version\\": 1') == 1
    path.write_bytes(data.replace(b'\\"version\\": 1', b'\\"version\\": 9'))


def another_model(path: Path) -> None:
    perturb(AutoModel.from_pretrained(path.parent), 5).save_pretrained(path.parent)


def rewrite(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = edit({name: tensor.clone() for name, tensor in load_file(path).items()})
        save_file(tensors, path, {"format": "pt"})

    return change


def twice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()}


def one_value(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Changes one value, where the fingerprint takes no sample."""
    tensors["encoder.layer.0.output.dense.weight"].view(-1)[1000] += 1
    return tensors


UNREADABLE = "{name} is not a readable safetensors file"
HEADER, TENSOR = "The header of .*{name} is damaged: checksum mismatch", "{name}: Tensor '.*' is damaged: checksum mismatch"
ANOTHER = "{form}', was compressed against '.*base'.* but '.*base' is another model or revision"
CHANGED = "encoder.layer.0.output.dense.weight' of the base .* has changed"
OF_ANOTHER_TASK = ("from_pretrained", "report")  # read no more than the header of task "cr"
NO_BASE = ("inspect", "report")
GIVEN = (*NO_BASE, "verify, base given")

#: By the forms, the file, what is done to it, what each reader says then, and the readers to whom it makes no difference.
WRONG: dict[tuple[str, ...], dict[str, tuple]] = {
    ("small",): {
        "header": (SHARD, flip_header, HEADER),
        "payload": (SHARD, flip(0.5), TENSOR),
        "last payload": (SHARD, flip(-1), TENSOR),
        "cut": (SHARD, cut(0.5), UNREADABLE),
        "a byte short": (SHARD, cut(1), UNREADABLE),
        "empty": (SHARD, cut(0), UNREADABLE),
        "longer": (SHARD, longer, UNREADABLE),
        "another save": (SHARD, replace, "{name} belongs to another save than the files beside it"),
        "no shard": (SHARD, Path.unlink, UNREADABLE + ": No such file"),
        "unlisted shard": (SHARD, unlist, "belongs to another save than .*, or some are missing"),
        "index": (INDEX, write("{}"), "{name} is not an index|'weight_map'"),
        "config": (CONFIG, write("{"), "{name}.* is not (a valid )?JSON"),
        "config of a list": (CONFIG, write("[]"), "{name} is not a JSON object|Unrecognized model"),
        "a circle": (CONFIG, settings(base="../next"), "need each other.*small.* → .*next", *GIVEN),
        "itself": (CONFIG, settings(base=""), "need each other.*small → .*small", *GIVEN),
    },
    (*METHODS,): {
        "header": (MODULATORS, flip_header, HEADER),
        "task": (MODULATORS, flip(0.9), "'.*' in .*{name} is damaged: checksum mismatch", *OF_ANOTHER_TASK),
        "last of a task": (MODULATORS, flip(-1), "'.*' in .*{name} is damaged: checksum mismatch", *OF_ANOTHER_TASK),
        "cut": (MODULATORS, cut(0.5), UNREADABLE),
        "a byte short": (MODULATORS, cut(1), UNREADABLE),
        "longer": (MODULATORS, longer, UNREADABLE),
        "another merge": (MODULATORS, replace, "{name} belongs to another merge"),
        "no task": (MODULATORS, Path.unlink, "{name} is missing: the folder is incomplete"),
        "another task": (MODULATORS, take_task, "{name} belongs to task 'trec', not 'cr'"),
        "later version": (MODULATORS, later_version, "format version 9.*update hf_ext"),
        "unlisted task": (CONFIG, settings(tasks=["trec"]), "does not list the task 'cr'", "report"),
        "unlisted first task": (CONFIG, settings(tasks=["cr"]), "does not list the task 'trec'", "report"),
        "task config": (TASK_CONFIG, write("{}"), "{name} is damaged: checksum mismatch", *OF_ANOTHER_TASK, "serve"),
        "no task config": (TASK_CONFIG, Path.unlink, "{name} is missing", *OF_ANOTHER_TASK, "serve"),
        "elected header": (WEIGHTS, flip_header, HEADER, "report"),
        "elected": (WEIGHTS, flip(-1), TENSOR, "report"),
        "cut elected": (WEIGHTS, cut(0.5), UNREADABLE, "report"),
        "no elected": (WEIGHTS, Path.unlink, "holds no safetensors weights|no file named model.safetensors"),
        "config": (CONFIG, write("{"), "{name}.* is not (a valid )?JSON"),
        "no config": (CONFIG, Path.unlink, "holds no merge|Unrecognized model"),
    },
    (*READERS,): {
        "a value of the base": (BASE, rewrite(one_value), CHANGED, *NO_BASE),
        "another base": (BASE, another_model, ANOTHER, *NO_BASE),
        "base of other names": (BASE, rewrite(lambda tensors: weights()), ANOTHER, *NO_BASE),
        "base of other shapes": (BASE, rewrite(twice), ANOTHER, *NO_BASE),
        "cut base": (BASE, cut(0.5), "base/" + UNREADABLE, *NO_BASE),
        "no base": (BASE, Path.unlink, "base'? .*holds no safetensors weights", *NO_BASE),
        "no folder": ("../base", shutil.rmtree, "there is no folder '.*base'", *NO_BASE),
        "not on the Hub": (CONFIG, settings(base="no/such"), "'no/such' is neither a folder nor", *GIVEN),
        "no name": (CONFIG, settings(base=5), "5 .* is not a valid name for the base", *GIVEN),
        "null": (CONFIG, settings(base=None), "None .* is not a valid name for the base", *GIVEN),
        "a merge": (CONFIG, settings(base="../again-emr"), "again-emr' of .* holds several models", *GIVEN),
    },
    ("emr",): {"elected of another merge": (WEIGHTS, replace, "belongs to another merge than the weights", "report")},
}


def test_nothing_is_wrong_before(written):
    for form in READERS:
        assert set(answers(form, written).values()) == {"nothing"}


@pytest.mark.parametrize(
    "form, row",
    [
        pytest.param(form, row, id=f"{form}-{wrong}")
        for forms, rows in WRONG.items()
        for form in forms
        for wrong, row in rows.items()
    ],
)
def test_every_reader_names_what_is_wrong(written, tmp_path, form, row):
    file, spoil, message, *unaffected = row
    place = shutil.copytree(written, tmp_path / "stored")
    spoil(place / form / file)
    message = message.format(name=re.escape(file.rpartition("/")[2]), form=form)
    raised = answers(form, place)
    silent = {name: text for name, text in raised.items() if not re.search(message, text)}
    assert silent == dict.fromkeys(raised.keys() & {*unaffected}, "nothing")
