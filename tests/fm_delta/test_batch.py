"""`fm_delta.compress_all` compresses many models, skips those that are done, and goes on after one that fails."""

import contextlib
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
import torch
from kills import die_or_compress
from tiny_checkpoints import contents, fine_tune, flip_bit, weights, write_folder

from hf_ext import fm_delta
from hf_ext.cli.main import main
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError
from hf_ext.fm_delta import batch
from hf_ext.fm_delta.batch import RECORD
from hf_ext.storage import prefetch
from hf_ext.storage.prefetch import CORES, Prefetcher, at_most_cores, cores

NAMES = ("one", "three", "two")


@pytest.fixture
def folder(tmp_path):
    """A base, and a folder of three fine-tunes and of what is no model."""
    write_folder(tmp_path / "base", weights())
    for seed, name in enumerate(NAMES):
        write_folder(tmp_path / "models" / name, fine_tune(weights(), seed), shards=1 + seed)
    (tmp_path / "models/notes").mkdir()
    (tmp_path / "models/README.md").write_text("mine")
    return tmp_path


def compress(folder, **options):
    return fm_delta.compress_all(folder / "models", folder / "out", **({"base": folder / "base"} | options))


def assert_restored(folder, before, names=NAMES):
    for name in names:
        fm_delta.decompress_checkpoint(folder / "out" / name, folder / "back" / name)
        assert contents(folder / "back" / name) == {
            path.removeprefix(f"{name}/"): digest for path, digest in before.items() if path.startswith(f"{name}/")
        }


def written(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}


def test_every_model_is_compressed_and_reported(folder):
    before = contents(folder / "models")
    report = compress(folder, verify=True)
    assert [model.name for model in report.models] == list(NAMES) and not report.failed
    assert all(model.verified and not model.deleted and 0 < model.ratio < 0.9 for model in report.models)
    assert json.loads((folder / "out" / RECORD).read_text()) == report.to_dict()
    assert "3 of 3 models done" in str(report) and str(folder / "base") in str(report)
    assert contents(folder / "models") == before
    assert_restored(folder, before)


def test_the_base_among_the_models_is_left_out(folder):
    report = fm_delta.compress_all([folder / "models/one", folder / "models/two"], folder / "out", folder / "base")
    assert [model.name for model in report.models] == ["one", "two"]
    shutil.copytree(folder / "base", folder / "models/base")
    report = fm_delta.compress_all(folder / "models", folder / "out", folder / "models/base")
    assert [model.name for model in report.models] == list(NAMES) and not report.failed


def test_the_base_of_every_model_is_found(folder):
    write_folder(folder / "other", weights(seed=9))
    for name, base in (("one", "base"), ("three", "other")):
        seeded = fine_tune(weights(seed=9 if base == "other" else 0))
        write_folder(folder / "models" / name, seeded, json.dumps({"_name_or_path": str(folder / base)}))
    report = compress(folder, base=None)
    assert {model.name: model.base for model in report.models if not model.error} == {
        "one": str(folder / "base"),
        "three": str(folder / "other"),
    }
    assert [model.name for model in report.failed] == ["two"] and "--base" in report.failed[0].error


# ---- again -----------------------------------------------------------------------------------------------------------


def test_finished_models_are_not_compressed_again(folder):
    compress(folder)
    first = written(folder / "out")
    again = compress(folder, level=1)
    assert not again.failed and written(folder / "out") == first and again.done_before == len(again.models)
    assert f"done ({again.done_before} by an earlier run, left as they are" in again.summary()
    assert not compress(folder, base=None).failed and written(folder / "out") == first
    report = compress(folder, verify=True)  # which has not been done
    assert all(model.verified for model in report.models)
    second = written(folder / "out")
    assert not set(second.items()) & set(first.items())
    assert compress(folder).models == report.models and written(folder / "out") == second


@pytest.mark.parametrize("change", ["source", "result", "result gone", "base", "record gone"])
def test_changed_models_are_compressed_again(folder, change):
    compress(folder)
    first = written(folder / "out")
    base = folder / "base"
    if change == "source":
        write_folder(folder / "models/one", fine_tune(weights(), 8))
    elif change == "result":
        flip_bit(folder / "out/one/model.safetensors")
    elif change == "result gone":
        shutil.rmtree(folder / "out/one")
    elif change == "base":
        base = shutil.copytree(base, folder / "copy")
    else:
        (folder / "out" / RECORD).unlink()
    before = contents(folder / "models")
    assert not compress(folder, base=base).failed
    redone = {Path(path).parent.name for path, when in written(folder / "out").items() if first.get(path) != when}
    assert redone == (set(NAMES) if change in ("base", "record gone") else {"one"})
    assert_restored(folder, before)


def test_a_record_that_cannot_be_read_is_an_error(folder):
    (folder / "out").mkdir()
    for text in ("no JSON", "[]", '{"models": [{"name": 1, "nonsense": 2}]}', '{"models": [3]}'):
        (folder / "out" / RECORD).write_text(text)
        with pytest.raises(CorruptFileError, match=RECORD):
            compress(folder)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_failed_model_stops_no_other_and_can_be_retried(folder):
    weights_file = folder / "models/one/model.safetensors"
    data = weights_file.read_bytes()
    weights_file.write_bytes(data[:-1])
    (folder / "models/broken").mkdir()
    (folder / "models/broken/model.safetensors.index.json").write_text("no JSON")
    report = compress(folder)
    assert {model.name for model in report.failed} == {"broken", "one"}
    assert "one/model.safetensors" in report.models[1].error and "is not an index" in report.models[0].error
    assert "2 of 4 models done" in str(report) and not (folder / "out/one").exists()
    weights_file.write_bytes(data)
    shutil.rmtree(folder / "models/broken")
    done = written(folder / "out")
    report = compress(folder)
    assert not report.failed and len(report.models) == 3
    assert done.items() <= written(folder / "out").items()


def test_an_impossible_run_is_one_error_and_writes_nothing(folder):
    one, again = folder / "models/one", shutil.copytree(folder / "models/one", folder / "again/one")
    for models, out, message in (
        ([one, again], "out", "Two models are called 'one'"),
        (folder / "models", "models", "holds the models themselves"),
        (one, "out", "nothing to compress"),
        (folder / "none", "out", "none is not a folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fm_delta.compress_all(models, folder / out, folder / "base")
    with pytest.raises(BaseModelError, match="none"):
        compress(folder, base=folder / "none")
    assert not (folder / "out").exists()
    compress(folder)
    with pytest.raises(CheckpointError, match=f"holds another model, compressed from {one}"):
        fm_delta.compress_all([again], folder / "out", folder / "base")


# ---- sources that are deleted ----------------------------------------------------------------------------------------


def test_sources_are_deleted_once_they_are_verified(folder):
    before = contents(folder / "models")
    compress(folder, verify=True)
    report = compress(folder, delete_source=True)  # of what was done before, too
    assert all(model.deleted for model in report.models) and not report.failed
    assert sorted(path.name for path in (folder / "models").iterdir()) == ["README.md", "notes"]
    assert compress(folder, delete_source=True).models == report.models
    listed = [folder / "models" / name for name in NAMES]
    assert fm_delta.compress_all(listed, folder / "out", folder / "base").models == report.models
    assert_restored(folder, before)
    write_folder(listed[0], fine_tune(weights(), 8))
    with pytest.raises(CheckpointError, match="holds another model"):  # and the only copy of it
        compress(folder)


def test_a_source_that_a_result_needs_is_not_deleted(folder):
    two, nested = folder / "models/two", folder / "models/three/nested"
    write_folder(folder / "models/one", fine_tune(fine_tune(weights(), 2), 1), json.dumps({"_name_or_path": str(two)}))
    shutil.copytree(two, nested)
    sources = [folder / "models" / name for name in NAMES]
    for source in (sources[1], nested, two):
        (source / "config.json").write_text(json.dumps({"_name_or_path": str(folder / "base")}))
    report = fm_delta.compress_all([*sources, nested], folder / "out", delete_source=True)
    deleted = {model.name: model.deleted for model in report.models}
    assert deleted == {"one": True, "two": False, "three": False, "nested": True}
    assert {model.name for model in report.failed} == {"two", "three"}
    assert "two lies in it and is needed" in str(report) and fm_delta.verify(folder / "out/one") == 7
    inside = fm_delta.compress_all([two], two / "out", folder / "base", delete_source=True)
    assert two.exists() and "needed" in inside.failed[0].error


def test_only_the_sources_of_this_run_are_deleted(folder):
    compress(folder, verify=True)
    fm_delta.compress_all([folder / "models/one"], folder / "out", folder / "base", delete_source=True)
    assert [name for name in NAMES if (folder / "models" / name).exists()] == ["three", "two"]


# ---- processes and machines ------------------------------------------------------------------------------------------


def test_a_process_that_dies_fails_only_the_model_that_killed_it(folder, monkeypatch):
    before = contents(folder / "models")
    monkeypatch.setattr(batch, "compress_job", die_or_compress)
    report = compress(folder, workers=2, level=1)
    assert [model.name for model in report.failed] == ["two"] and "The process died (exit code -9)" in report.failed[0].error
    assert_restored(folder, before, ("one", "three"))


RUN = """
import sys
from hf_ext import fm_delta

if __name__ == "__main__":
    print(fm_delta.compress_all("models", "out", "base", workers=2, level=1, delete_source=True))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes as Linux does")
def test_a_run_that_is_killed_leaves_no_worker_and_goes_on(folder):
    for seed in range(6):
        write_folder(folder / f"models/more{seed}", fine_tune(weights(), seed))
    before = contents(folder / "models")
    (folder / "run.py").write_text(RUN)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.Popen([sys.executable, "run.py"], cwd=folder, env=env, stderr=subprocess.PIPE, start_new_session=True)
    record = folder / "out" / RECORD
    deadline = time.monotonic() + 100
    while not (record.exists() and record.read_text().count('"deleted": true') > 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.communicate(timeout=60)  # its workers hold the pipe open for as long as they live
    assert first.returncode == -signal.SIGKILL
    done = [name for name in os.listdir(folder / "out") if not (folder / "models" / name).exists() and name != RECORD]
    assert 1 < len(done) < 9
    first_written = {name: written(folder / "out" / name) for name in done}
    report = compress(folder, level=1, delete_source=True)
    assert not report.failed and len(report.models) == 9 and all(model.deleted for model in report.models)
    assert all(written(folder / "out" / name) == first_written[name] for name in done)
    names = [model.name for model in report.models]
    assert_restored(folder, before, names)
    assert not list(folder.rglob("*partial*"))


def test_any_executor_spreads_the_work(folder):
    with ThreadPoolExecutor(2) as executor:
        report = compress(folder, executor=executor, verify=True)
    assert len(report.models) == 3 and not report.failed


def test_the_workers_of_a_dask_cluster_do_it(folder, capsys):
    distributed = pytest.importorskip("distributed")
    assert main(["compress-all", str(folder / "models"), "--out", str(folder / "out"), "--scheduler", "nowhere"]) == 2
    assert "'nowhere' is not an address" in capsys.readouterr().err
    before = contents(folder / "models")
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, env=path) as cluster:
        command = ["compress-all", folder / "models", "--base", folder / "base", "--out", folder / "out", "--verify", "--json"]
        assert main([*map(str, command), "--scheduler", cluster.scheduler_address]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [model["verified"] for model in report["models"]] == [True, True, True]
    assert_restored(folder, before)


def test_a_limit_of_cores_holds_in_the_threads_too():
    assert cores() == CORES
    with at_most_cores(1):
        ahead = Prefetcher(lambda name: cores(), {str(i): 1 for i in range(4)})
        assert cores() == 1 and [count for _, count in ahead] == [1] * 4
    assert cores() == CORES
    with pytest.raises(ValueError, match="1 or more, not 0"), at_most_cores(0):
        pass
    with at_most_cores(10_000):
        assert cores() == CORES


def test_processes_share_the_cores_that_are_left_to_a_run(folder, monkeypatch):
    shares = []

    def here(job):  # instead of in a process
        shares.append(job.cores)
        return batch.compress_job(job)

    monkeypatch.setattr(batch, "compress_in_process", here)
    monkeypatch.setattr(prefetch, "CORES", 8)
    for limit in (None, 6, 1):
        with at_most_cores(limit) if limit else contextlib.nullcontext():
            fm_delta.compress_all(folder / "models", folder / f"out-{limit}", folder / "base", workers=2)
    assert shares == [4] * 3 + [3] * 3 + [1] * 3


def test_pytorch_keeps_its_cores_if_a_pool_is_first_to_use_it():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)

    def threads_after(work: str) -> str:
        script = (
            f"import torch; from hf_ext.storage.prefetch import Prefetcher, in_threads; {work}; print(torch.get_num_threads())"
        )
        return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout

    alone = threads_after("pass")
    assert alone and alone == threads_after("list(Prefetcher(str, dict.fromkeys('ab', 1)))") == threads_after(
        "in_threads(str, 2, 2)"
    )


def test_pytorch_uses_one_core_per_tensor():
    def threads_of_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.closing(Prefetcher(lambda _: torch.get_num_threads(), dict.fromkeys("abcdef", 1))) as work:
            assert [threads for _, threads in work] == [1] * 6
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == threads_of_a_new_thread() == 3
        work = Prefetcher(lambda _: torch.get_num_threads(), dict.fromkeys("abcdef", 1))
        assert work.result("a") == 1
        del work  # by a reader that failed
        assert threads_of_a_new_thread() == 3
    finally:
        torch.set_num_threads(before)
