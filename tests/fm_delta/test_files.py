"""A compressed folder gives back every file byte for byte, and is itself a checkpoint that names the same tensors."""

import itertools
import json

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_checkpoints import (
    CONFIG,
    SAFETENSORS_DTYPES,
    assert_restored,
    compressed_pair,
    contents,
    fine_tune,
    pair,
    weights,
    write_folder,
    write_safetensors,
)

from hf_ext import fm_delta
from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.storage import at_most_cores, prefetch
from hf_ext.storage.checkpoint import Checkpoint
from hf_ext.storage.config_file import HINT
from hf_ext.storage.delta import writer
from hf_ext.storage.delta.file import MAX_USES, SEAL, CompressedFile, check_shards
from hf_ext.storage.delta.payload import read_header
from hf_ext.storage.safetensors_file import RawTensor, SafetensorsFile, safetensors_dtype
from hf_ext.storage.weights import KEY


def round_trip(tmp_path, src, base):
    """Compresses, checks, decompresses, compares; returns the compressed folder."""
    small = tmp_path / "small"
    fm_delta.compress_checkpoint(src, base, small)
    fm_delta.verify(small)
    assert_restored(small, src)
    assert contents(small).keys() - {"README.md"} == contents(src).keys()
    return small


# ---- whole folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_comes_back_byte_for_byte(tmp_path, dtype, shards):
    src, base = pair(tmp_path, dtype, shards)
    small = round_trip(tmp_path, src, base)
    payloads = [file.payload(name) for file in compressed_files(small) for name in file.original]
    assert sum(map(len, payloads)) < sum(raw.data.size for raw in map(Checkpoint(src).read, Checkpoint(src).names()))


def compressed_files(folder):
    return [CompressedFile(path) for path in sorted(folder.glob("*.safetensors"))]


def test_variants_are_restored_beside_the_main_weights(tmp_path):
    src, base = pair(tmp_path, shards=2)
    half = fine_tune(weights(torch.float16))
    names = list(half)
    for i, part in enumerate((names[:3], names[3:])):
        file = f"model.fp16-0000{i + 1}-of-00002.safetensors"
        save_file({name: half[name] for name in part}, src / file, {"format": "pt"})
    save_file(fine_tune(weights(torch.bfloat16)), src / "model.my-variant.safetensors")
    small = round_trip(tmp_path, src, base)
    assert len(compressed_files(small)) == 5
    (small / "model.fp16-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard 00002 of 00002 of 'model.fp16' is missing"):
        fm_delta.verify(small)


@pytest.mark.parametrize(
    "names", [("a.safetensors", "z.safetensors"), ("m-01-of-000002.safetensors", "m-02-of-000002.safetensors")]
)
def test_the_shards_of_an_index_are_one_set(tmp_path, names):
    src, base = pair(tmp_path, shards=2)
    index = src / "model.safetensors.index.json"
    for old, new in zip(sorted(src.glob("*.safetensors")), names, strict=True):
        index.write_text(index.read_text().replace(old.name, new))
        old.rename(src / new)
    write_safetensors(src / "model.safetensors", fine_tune(weights(), seed=2))
    write_safetensors(src / "adapter_model.safetensors", weights())
    small = round_trip(tmp_path, src, base)
    check_shards([CompressedFile(small / name) for name in names])  # as from_pretrained does
    assert (small / "adapter_model.safetensors").read_bytes() == (src / "adapter_model.safetensors").read_bytes()
    (small / names[1]).unlink()
    with pytest.raises(CorruptFileError, match=f"{names[0]} belongs to another save"):
        fm_delta.verify(small)


def test_every_file_that_holds_no_weights_is_carried_along(tmp_path):
    src, base = pair(tmp_path)
    save_file({"lora_A": torch.randn(4, 4)}, src / "adapter_model.safetensors")
    for name, content in {
        "tokenizer.json": b'{"version": "1.0"}\r\n',
        "merges.txt": "naïve\n".encode(),
        ".gitattributes": b"*.safetensors filter=lfs",
        "checkpoint-5/model.safetensors": (src / "model.safetensors").read_bytes(),
        "checkpoint-5/config.json": b"{}",
        "onnx/deep/er/model.onnx": bytes(range(256)),
        "pytorch_model.bin": b"\x80",
        "empty": b"",
    }.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(content)
    small = round_trip(tmp_path, src, base)
    changed = {name for name, digest in contents(small).items() if contents(src).get(name) != digest}
    assert changed == {"model.safetensors", "config.json", "README.md"}


CONFIGS = {
    "none": None,
    "usual": CONFIG,
    "compact": '{"model_type":"bert"}',
    "without a last newline": '{\n  "model_type": "bert"\n}',
    "trailing space": '{"model_type": "bert" }  \n\n\t',
    "leading space": '\n  {"model_type": "bert"}',
    "empty": "{}",
    "empty with space": "{ \n }",
    "windows": '{\r\n  "model_type": "bert"\r\n}\r\n',
    "braces in texts": '{"template": "{{ a }} {", "id2label": {"0": "}"}}',
    "unicode": '{"name": "ß \\u00df \U0001f917"}',
    "duplicates": '{"a": 1, "a": 2}',
    "an empty entry": '{"quantization_config": null, "a": 1}',
    "an empty last entry": '{\n  "quantization_config": null\n}',
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_config_json_comes_back_however_it_is_laid_out(tmp_path, config):
    base = write_folder(tmp_path / 'a "quoted" {base}', weights())
    src = write_folder(tmp_path / "tuned", fine_tune(weights()), config)
    small = round_trip(tmp_path, src, base)
    if config is not None:
        settings = {
            "quant_method": "hf_ext.fm_delta",
            "hint": HINT,
            "base": f"../{base.name}",
            "revision": None,
            "dtype": "float32",
        }
        settings["card"] = "added"
        stored = json.loads((small / "config.json").read_text())
        stored["quantization_config"] = {key: stored["quantization_config"][key] for key in settings}
        assert stored == json.loads(config) | {"quantization_config": settings}


def test_config_json_may_be_edited_or_written_anew_in_between(tmp_path):
    src, base = pair(tmp_path)
    small = round_trip(tmp_path, src, base)
    path = small / "config.json"
    text = path.read_text()
    for changed, expected in [
        (text.replace(str(base), str(tmp_path / "other")), CONFIG),
        (text.replace('"revision": null,\n    ', ""), CONFIG),
        (text.replace(": 16", ": 32"), CONFIG.replace(": 16", ": 32")),
        (json.dumps(json.loads(text), indent=4, sort_keys=True), None),
        (json.dumps(json.loads(text), sort_keys=True), None),
        (CONFIG, CONFIG),
    ]:
        path.write_text(changed)
        fm_delta.decompress_checkpoint(small, tmp_path / "again", base=base, overwrite=True)
        restored = (tmp_path / "again/config.json").read_text()
        assert json.loads(restored) == json.loads(expected or CONFIG)
        assert expected is None or restored == expected


# ---- headers and tensors ---------------------------------------------------------------------------------------------

ODD_NAMES = [
    "",
    ".",
    "a.",
    "..a",
    "with space",
    "ünïcödé.權重.\U0001f917",
    "quo'te\"d",
    "back\\slash",
    "tab\tnewline\n",
    "\0",
    "{}",
]


@pytest.mark.parametrize(
    ("metadata", "layout"),
    [
        (None, {}),
        ({}, {}),
        ({"format": "pt", "author": 'quoted "ß"', "": "\n", "step": "5"}, {}),
        ({"format": "pt", "emr": "{}", "emr_checksum": "", "fm_delta_checksum": "0" * 16, "__metadata__": "{}"}, {}),
        ({"format": "pt"}, {"indent": 2}),
        ({"format": "pt"}, {"separators": (" ,\t", " : ")}),
        ({"format": "pt"}, {"ensure_ascii": False}),
        ({"format": "pt"}, {"padding": " "}),
        ({"format": "pt"}, {"padding": "\n\t  \r"}),
        ({"format": "pt"}, {"padding": " " * 4099}),
    ],
    ids=str,
)
def test_headers_come_back_however_they_are_written(tmp_path, metadata, layout):
    base = weights()
    tuned = dict(reversed(fine_tune(base).items())) | {name: torch.arange(3) for name in ODD_NAMES}
    src, base = tmp_path / "tuned", write_folder(tmp_path / "base", base)
    write_safetensors(src / "model.safetensors", tuned, metadata, **layout)
    small = round_trip(tmp_path, src, base)
    kept = SafetensorsFile(small / "model.safetensors").metadata
    for texts in (kept, metadata := dict(metadata or {})):
        for seal in SEAL.keys:
            texts.pop(seal, None)
    assert kept == metadata


def test_metadata_may_be_null_or_come_last(tmp_path):
    base = write_folder(tmp_path / "base", weights())
    for i, (start, end) in enumerate([('"__metadata__": null, ', ""), ("", ', "__metadata__": {"a": "b"}')]):
        header = f'{{{start}"x": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}{end}}}'.encode()
        src = tmp_path / f"tuned{i}"
        src.mkdir()
        (src / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        (tmp_path / str(i)).mkdir()
        round_trip(tmp_path / str(i), src, base)


def test_tensors_of_every_type_and_shape_come_back_from_files(tmp_path):
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype, shape in itertools.product(SAFETENSORS_DTYPES, [(), (0,), (5,), (3, 7), (2, 3, 4, 5, 6)]):
        size = torch.empty(shape, dtype=dtype).nbytes
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=rng, dtype=torch.uint8).numpy()
        tensors[f"{dtype}{list(shape)}"] = RawTensor(safetensors_dtype(dtype), shape, data)
    src, base = write_folder(tmp_path / "tuned", tensors, shards=2), write_folder(tmp_path / "base", weights())
    small = round_trip(tmp_path, src, base)
    assert {header.base_name for file in compressed_files(small) for header in file.headers.values()} == {""}
    (tmp_path / "same").mkdir()
    round_trip(tmp_path / "same", src, write_folder(tmp_path / "all", tensors))


def test_types_that_share_bytes_come_back_from_files(tmp_path):
    tensors = {name: RawTensor(name, (8,), np.arange(size, dtype=np.uint8)) for name, size in [("F4", 4), ("F6_E2M3", 6)]}
    src = write_folder(tmp_path / "tuned", tensors)
    round_trip(tmp_path, src, write_folder(tmp_path / "base", tensors | weights()))


def test_a_checkpoint_without_tensors_comes_back(tmp_path):
    src, base = write_folder(tmp_path / "tuned", {}), write_folder(tmp_path / "base", weights())
    small = round_trip(tmp_path, src, base)
    assert fm_delta.verify(small) == 0
    assert json.loads((small / "config.json").read_text())["quantization_config"]["dtype"] is None


def test_tensors_are_predicted_across_prefixes_and_old_names(tmp_path):
    base = {
        "embeddings.LayerNorm.gamma": torch.ones(500),
        "embeddings.LayerNorm.beta": torch.rand(500),
        "encoder.layer.0.dense.weight": torch.randn(50, 50),
        "encoder.shared.weight": torch.randn(90, 30),
    }
    twins = {
        "bert.embeddings.LayerNorm.weight": "embeddings.LayerNorm.gamma",
        "bert.embeddings.LayerNorm.bias": "embeddings.LayerNorm.beta",
        "bert.encoder.layer.0.dense.weight": "encoder.layer.0.dense.weight",
        "encoder.shared.weight": "encoder.shared.weight",
        "decoder.shared.weight": "encoder.shared.weight",  # a tie that was written twice
    }
    tuned = fine_tune(base)
    tuned = {name: tuned[twin].clone() for name, twin in twins.items()} | {"classifier.weight": torch.randn(3, 50)}
    small = round_trip(tmp_path, write_folder(tmp_path / "tuned", tuned), write_folder(tmp_path / "base", base))
    headers = CompressedFile(small / "model.safetensors").headers
    assert {name: header.base_name for name, header in headers.items()} == twins | {"classifier.weight": ""}


# ---- the compressed file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a_compressed_file_is_safetensors_with_the_same_names(tmp_path, shards):
    tensors = {f"{ndim}d": torch.randn([2] * ndim) for ndim in range(6)}
    tensors |= {"steps": torch.arange(3), "none": torch.empty(0)}
    src = write_folder(tmp_path / "tuned", tensors, shards=shards)
    fm_delta.compress_checkpoint(src, write_folder(tmp_path / "base", weights()), tmp_path / "small")
    for path in src.glob("*.safetensors"):
        with safe_open(path, "pt") as original, safe_open(tmp_path / "small" / path.name, "pt") as compressed:
            assert set(compressed.keys()) == set(original.keys())
            assert compressed.metadata()["format"] == "pt"
            for name in original.keys():
                payload = compressed.get_tensor(name)
                assert payload.dtype == torch.uint8
                assert payload.dim() != original.get_tensor(name).dim()
                assert read_header(payload.reshape(-1).numpy(), name).name == name


def test_digest_and_fingerprint_are_those_of_the_documentation(tmp_path):
    src, base, small = compressed_pair(tmp_path, shards=2)
    tuned, base = Checkpoint(src), Checkpoint(base)
    digest, fingerprint = xxhash.xxh3_128(), xxhash.xxh3_128()
    for name in sorted(tuned.names()):
        digest.update(f"{name}\0{xxhash.xxh3_64_intdigest(tuned.read(name).data)}\0".encode())
    for name in sorted(base.names()):
        data = base.read(name).data.tobytes()
        fingerprint.update(f"{name}\0{base.read(name).dtype}\0{base.read(name).shape}\0".encode())
        for at in (0, len(data) // 2, max(0, len(data) - 1024)):
            fingerprint.update(data[at : at + 1024])
    for file in compressed_files(small):
        assert (file.digest, file.base.fingerprint) == (digest.hexdigest(), fingerprint.hexdigest())
        assert file.fingerprint == tuned.fingerprint
        assert json.loads(file.file.metadata[KEY]).keys() == {"hint", "version", "digest", "fingerprint", "base", "header"}


def test_a_relative_base_is_recorded_as_absolute(tmp_path, monkeypatch):
    src, base = pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    fm_delta.compress_checkpoint("tuned", "base", "small")
    monkeypatch.chdir("/")
    assert fm_delta.verify(tmp_path / "small") == 7


@pytest.mark.parametrize("shards", [1, 3])
def test_the_bytes_do_not_depend_on_the_number_of_cores(tmp_path, monkeypatch, shards):
    src, base = pair(tmp_path, shards=shards)
    generator = torch.Generator().manual_seed(0)
    for folder in (src, base):  # large enough for all cores to share it
        save_file({"large": torch.randn(700, 1000, generator=generator)}, folder / "model.large.safetensors")
    folders = []
    for cores, ahead in [(1, 1 << 28), (1, 1 << 28), (2, 1 << 28), (prefetch.cores(), 1 << 28), (prefetch.cores(), 1)]:
        monkeypatch.setattr(prefetch, "AHEAD", ahead)  # bytes of results that may wait
        folders.append(tmp_path / f"small{len(folders)}")
        with at_most_cores(cores):
            fm_delta.compress_checkpoint(src, base, folders[-1])
            assert_restored(folders[-1], src)
    assert all(contents(folder) == contents(folders[0]) for folder in folders)


def test_one_file_can_be_checked_and_restored_by_itself(tmp_path):
    src, _, small = compressed_pair(tmp_path, shards=2)
    name = "model-00002-of-00002.safetensors"
    assert fm_delta.verify(small / name) == 3
    fm_delta.decompress_checkpoint(small / name, tmp_path / "back")
    assert contents(tmp_path / "back") == {name: contents(src)[name]}


def test_the_folder_may_lie_in_the_one_it_was_made_of(tmp_path, monkeypatch):
    src, base = pair(tmp_path)
    expected = contents(src)
    for _ in range(2):  # the second time it is there already
        fm_delta.compress_checkpoint(src, base, src / "small")
    monkeypatch.chdir(src)
    fm_delta.compress_checkpoint(src, base, "small")
    assert contents(src / "small").keys() == expected.keys() | {"README.md"}
    fm_delta.decompress_checkpoint(src / "small", src / "small/back")
    assert contents(src / "small/back") == expected


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_unusable_source_is_named(tmp_path):
    src, base = pair(tmp_path)
    (tmp_path / "empty").mkdir()
    for wrong, message in [
        (src / "config.json", "config.json is not a folder"),
        (base, "base is the base model itself"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            fm_delta.compress_checkpoint(wrong, base, tmp_path / "out")
    for wrong, message in ((tmp_path / "none", "does not exist"), (tmp_path / "empty", "holds no safetensors weights")):
        for function in (fm_delta.verify, fm_delta.inspect):
            with pytest.raises(CheckpointError, match=message):
                function(wrong)
    for plain in (src, src / "model.safetensors"):
        with pytest.raises(CorruptFileError, match="model.safetensors is not compressed by FM-Delta"):
            fm_delta.verify(plain)
    assert not (tmp_path / "out").exists()


def test_one_tensor_of_the_base_predicts_few_others(tmp_path, monkeypatch):
    big = torch.randn(64, 64)
    base = write_folder(tmp_path / "base", {"big.weight": big})
    src = write_folder(tmp_path / "tuned", {f"{i}.big.weight": big + 1e-4 for i in range(MAX_USES + 1)})
    file = CompressedFile(round_trip(tmp_path, src, base) / "model.safetensors")
    assert sum(header.base_values > 0 for header in file.headers.values()) == MAX_USES
    monkeypatch.setattr(writer, "MAX_USES", MAX_USES + 1)
    with pytest.raises(CorruptFileError, match=f"one tensor of the base predicts {MAX_USES + 1} others"):
        fm_delta.compress_checkpoint(src, base, tmp_path / "other")  # which opens what it has written
