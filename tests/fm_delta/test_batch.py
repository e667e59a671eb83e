"""`fm_delta.compress_all` compresses many models, skips those that are done, and goes on after one that fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kills import die_or_compress
from tiny_checkpoints import assert_restored, contents, fine_tune, weights, write_folder

from hf_ext import BaseModelError, CheckpointError, CorruptFileError, fm_delta
from hf_ext.cli.main import main
from hf_ext.fm_delta import batch
from hf_ext.fm_delta.batch import RECORD, BatchReport, ModelResult
from hf_ext.storage import prefetch

NAMES = ["one", "three", "two"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A base, and a folder of three fine-tunes and of what is no model."""
    folder = tmp_path_factory.mktemp("batch")
    write_folder(folder / "base", weights())
    for seed, name in enumerate(NAMES):
        write_folder(folder / "models" / name, fine_tune(weights(), seed), shards=1 + seed)
    (folder / "models/README.md").write_text("mine")
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "batch")


def compress(folder: Path, **options) -> batch.BatchReport:
    return fm_delta.compress_all(folder / "models", folder / "out", **({"base": folder / "base", "level": 1} | options))


def assert_all_restored(folder: Path, names=NAMES) -> None:
    for name in names:
        assert_restored(folder / "out" / name, folder / "models" / name)


def written_at(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}


def test_every_model_is_compressed_and_reported(folder):
    before = contents(folder / "models")
    report = compress(folder, verify=True, level=2)
    assert [model.name for model in report.models] == NAMES and not report.failed
    assert all(model.verified and 0 < model.ratio < 0.9 for model in report.models)
    record = json.loads((folder / "out" / RECORD).read_text())
    assert record == json.loads(json.dumps(report.to_dict()))
    assert str(report).endswith(report.summary()) and "3 of 3 models done" in report.summary()
    assert contents(folder / "models") == before
    assert_all_restored(folder)


def test_the_base_among_the_models_is_left_out(folder):
    shutil.copytree(folder / "base", folder / "models/base")
    assert [model.name for model in compress(folder, base=folder / "models/base").models] == NAMES


def test_the_base_of_every_model_is_searched_for(folder):
    write_folder(folder / "other", weights(seed=9))
    for name, base in (("one", "base"), ("three", "other")):
        tensors = fine_tune(weights(seed=9 if base == "other" else 0))
        write_folder(folder / "models" / name, tensors, json.dumps({"_name_or_path": str(folder / base)}))
    report = compress(folder, base=None)
    bases = {model.name: model.base for model in report.models if not model.error}
    assert bases == {"one": str(folder / "base"), "three": str(folder / "other")}
    assert [model.name for model in report.failed] == ["two"] and "--base" in report.failed[0].error


# ---- again -----------------------------------------------------------------------------------------------------------


def test_finished_models_are_not_compressed_again(folder):
    compress(folder)
    first = written_at(folder / "out")
    for options in ({"level": 2}, {"base": None}):
        report = compress(folder, **options)
        assert not report.failed and written_at(folder / "out") == first
        assert "Skipped 3, which an earlier run had done." in report.summary()
    report = compress(folder, verify=True)  # which has not been done
    assert all(model.verified for model in report.models)
    assert not set(written_at(folder / "out").items()) & set(first.items())


@pytest.mark.parametrize("change", ["source", "result", "result gone", "config gone", "base", "record gone"])
def test_changed_models_are_compressed_again(folder, change):
    compress(folder)
    first, base = written_at(folder / "out"), folder / "base"
    if change == "source":
        write_folder(folder / "models/one", fine_tune(weights(), 8))
    elif change == "result":
        (folder / "out/one/model.safetensors").write_bytes(b"damaged")
    elif change == "config gone":
        (folder / "out/one/config.json").unlink()
    elif change == "result gone":
        shutil.rmtree(folder / "out/one")
    elif change == "base":
        base = shutil.copytree(base, folder / "copy")
    else:
        (folder / "out" / RECORD).unlink()
    assert not compress(folder, base=base).failed
    redone = {Path(path).parent.name for path, when in written_at(folder / "out").items() if first.get(path) != when}
    assert redone == (set(NAMES) if change in ("base", "record gone") else {"one"})
    if change != "config gone":  # with it the record that the card was added
        assert_all_restored(folder)


def test_a_record_that_cannot_be_read_is_an_error(folder):
    (folder / "out").mkdir()
    for text in ("no JSON", "[]", '{"models": [{"name": 1, "nonsense": 2}]}', '{"models": [3]}'):
        (folder / "out" / RECORD).write_text(text)
        with pytest.raises(CorruptFileError, match=RECORD):
            compress(folder)


def test_a_model_without_config_json_is_noted(folder):
    (folder / "models/two/config.json").unlink()
    report = compress(folder)
    assert not report.failed and f"two: {folder / 'models/two'} has no config.json" in str(report)


def test_reasons_name_paths_as_they_are():
    error = "/FOLDER/base is not the base of /FOLDER/one"
    assert f"one: {error}\n" in str(BatchReport([ModelResult("one", "/FOLDER/one", error=error)]))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_failed_model_stops_no_other_and_can_be_retried(folder):
    weights_file = folder / "models/one/model.safetensors"
    data = weights_file.read_bytes()
    weights_file.write_bytes(data[:-1])
    (folder / "models/broken").mkdir()
    (folder / "models/broken/model.safetensors.index.json").write_text("no JSON")
    report = compress(folder)
    assert [model.name for model in report.failed] == ["broken", "one"] and "2 of 4 models done" in str(report)
    assert "is not an index" in report.failed[0].error and "one/model.safetensors" in report.failed[1].error
    weights_file.write_bytes(data)
    shutil.rmtree(folder / "models/broken")
    done = written_at(folder / "out")
    report = compress(folder)
    assert [model.name for model in report.models] == NAMES and not report.failed
    assert done.items() <= written_at(folder / "out").items()


def test_an_impossible_run_is_one_error_and_writes_nothing(folder):
    one, again = folder / "models/one", shutil.copytree(folder / "models/one", folder / "again/one")
    for models, message in (
        ([one, again], "Two models are called 'one'"),
        (one, "nothing to compress"),
        (folder / "none", "none is not a folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fm_delta.compress_all(models, folder / "out", folder / "base")
    with pytest.raises(BaseModelError, match="none"):
        compress(folder, base=folder / "none")
    assert not (folder / "out").exists()
    compress(folder)
    with pytest.raises(CheckpointError, match=f"holds another model, compressed from {one}"):
        fm_delta.compress_all([again], folder / "out", folder / "base")
    assert all(
        "cannot be overwritten" in model.error
        for model in fm_delta.compress_all(folder / "models", folder / "models", folder / "base").failed
    )


# ---- processes and machines ------------------------------------------------------------------------------------------


def test_a_process_that_dies_fails_only_the_model_that_killed_it(folder, monkeypatch):
    monkeypatch.setattr(batch, "compress_model", die_or_compress)
    report = compress(folder, workers=2)
    assert [model.name for model in report.failed] == ["two"] and "The process that compressed it died" in report.failed[
        0
    ].error
    assert_all_restored(folder, ["one", "three"])


RUN = """
from hf_ext import fm_delta

if __name__ == "__main__":
    fm_delta.compress_all("models", "out", "base", workers=2, level=1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")
def test_a_run_that_is_killed_leaves_no_worker_and_goes_on(folder):
    for seed in range(3):
        write_folder(folder / f"models/more{seed}", fine_tune(weights(), seed))
    (folder / "run.py").write_text(RUN)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.Popen([sys.executable, "run.py"], cwd=folder, env=env, stderr=subprocess.PIPE, start_new_session=True)
    record = folder / "out" / RECORD
    deadline = time.monotonic() + 100
    while not (record.exists() and "stamps" in record.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.communicate(timeout=60)  # its workers hold the pipe open for as long as they live
    assert first.returncode == -signal.SIGKILL
    done = [model["name"] for model in json.loads(record.read_text())["models"]]
    first_written = {name: written_at(folder / "out" / name) for name in done}
    report = compress(folder)
    assert 0 < len(done) < len(report.models) == 6 and not report.failed
    assert all(written_at(folder / "out" / name) == first_written[name] for name in done)
    assert_all_restored(folder, [model.name for model in report.models])
    assert not list(folder.rglob("*partial*"))


def test_any_executor_spreads_the_work(folder):
    with ThreadPoolExecutor(2) as executor:
        report = compress(folder, executor=executor, verify=True)
    assert len(report.models) == 3 and not report.failed


def test_the_workers_of_a_dask_cluster_do_it(folder, capsys):
    distributed = pytest.importorskip("distributed")
    assert main(["compress-all", str(folder / "models"), "--out", str(folder / "out"), "--scheduler", "nowhere"]) == 2
    assert "'nowhere' is not an address" in capsys.readouterr().err
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None, "processes": False, "protocol": "tcp://"}
    with distributed.LocalCluster(**options) as cluster:
        command = ["compress-all", folder / "models", "--base", folder / "base", "--out", folder / "out", "--verify", "--json"]
        assert main([*map(str, command), "--scheduler", cluster.scheduler_address]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [model["verified"] for model in report["models"]] == [True, True, True]
    assert_all_restored(folder)


def test_processes_share_the_cores_that_are_left_to_a_run(folder, monkeypatch):
    shares = []

    def here(processes, *arguments):  # instead of in a process
        shares.append(arguments[-1])
        return batch.compress_model(*arguments)

    monkeypatch.setattr(batch, "compress_in_process", here)
    monkeypatch.setattr(prefetch, "CORES", 8)
    for limit in (8, 6, 1):
        with prefetch.at_most_cores(limit):
            compress(folder, workers=2)
        shutil.rmtree(folder / "out")
    assert shares == [4] * 3 + [3] * 3 + [1] * 3
