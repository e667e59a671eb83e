"""Reading a damaged or forged file, config.json or base raises an HfExtError or returns the original bytes."""

import base64
import json
import os
import random
import shutil
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash
from repeats import repeats
from safetensors.torch import load_file
from tiny_checkpoints import CONFIG, contents, fine_tune, write_folder
from tiny_models import same_bits

from hf_ext import fm_delta
from hf_ext.errors import BaseModelError, CheckpointError, CorruptFileError, HfExtError
from hf_ext.storage.delta.codec import decode_raw, encode_raw
from hf_ext.storage.delta.file import MAX_HEADER, CompressedFile
from hf_ext.storage.delta.payload import read_header
from hf_ext.storage.safetensors_file import Entry, RawTensor, SafetensorsFile, write_header
from hf_ext.storage.sealed import header_checksum

pytestmark = pytest.mark.usefixtures("no_progress_bars")
READERS = (fm_delta.verify, fm_delta.inspect, fm_delta.open)


def small_pair(folder: Path) -> tuple[Path, Path]:
    """A fine-tune and a base with a tensor of each kind: predicted, resized, alone, stored, deflated."""
    generator = torch.Generator().manual_seed(3)
    base = {
        "a.weight": torch.randn(12, 12, generator=generator),
        "b.weight": torch.randn(3, 64, generator=generator).bfloat16(),
    }
    tuned = fine_tune(base)
    tuned["b.weight"] = torch.cat([tuned["b.weight"], torch.ones(1, 64, dtype=torch.bfloat16)])
    tuned |= {
        "c.weight": torch.randn(8, 24, generator=generator) * 0.01,
        "steps": steps().to_torch()[0],
        "mask": torch.ones(9, 9).tril().bool(),
    }
    return write_folder(folder / "tuned", tuned), write_folder(folder / "base", base)


@pytest.fixture
def compressed(tmp_path) -> Path:
    """A folder with tuned, base and small, which is tuned as compressed."""
    fm_delta.compress_checkpoint(*small_pair(tmp_path), tmp_path / "small")
    return tmp_path


def assert_right_or_refused(folder: Path) -> bool:
    """Whether `small` is still read; the weights are then the original's."""
    shutil.rmtree(folder / "back", ignore_errors=True)
    one_by_one = is_read_one_by_one(folder)
    try:
        fm_delta.verify(folder / "small")
    except HfExtError as error:
        assert str(error) and not one_by_one
        return False
    fm_delta.decompress_checkpoint(folder / "small", folder / "back")
    assert contents(folder / "back")["model.safetensors"] == contents(folder / "tuned")["model.safetensors"] and one_by_one
    return True


def is_read_one_by_one(folder: Path) -> bool:
    """Whether each tensor of `small` can be read alone. Those that can be are the original's."""
    expected = load_file(folder / "tuned/model.safetensors")
    try:
        with fm_delta.open(folder / "small") as checkpoint:
            for name in checkpoint.keys():
                assert same_bits(checkpoint.get_tensor(name), expected[name])
    except HfExtError as error:
        assert str(error)
        return False
    return True


# ---- accidents -------------------------------------------------------------------------------------------------------


@repeats("stride", 23, 1)
def test_every_flipped_byte_is_noticed_or_changes_nothing(compressed, stride):
    path = compressed / "small/model.safetensors"
    data = path.read_bytes()
    rng = random.Random(0)
    survived = []
    for at in range(0, len(data), stride):
        for mask in {0xFF, 1 << rng.randrange(8), *rng.sample(range(1, 256), 3)}:
            path.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            if assert_right_or_refused(compressed):
                survived.append((at, mask))
    # White space may become other white space; within the tensors nothing goes unnoticed.
    header = 8 + int.from_bytes(data[:8], "little")
    assert all(at < header for at, _ in survived)
    assert len(survived) < 0.02 * len(data)


@repeats("stride", 5, 1)
@pytest.mark.parametrize("name", ["small/config.json", "base/model.safetensors"])
def test_a_flip_in_config_or_base_never_changes_weights(compressed, name, stride):
    path = compressed / name
    data = path.read_bytes()
    rng = random.Random(2)
    for at in range(0, len(data), stride):
        path.write_bytes(data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :])
        assert_right_or_refused(compressed)


@pytest.mark.parametrize(
    "config", [b"", b"{", b"[]", b"null", b'"fm_delta"', b"[" * 100_000, "\ufeff{}".encode(), b'{"a": "\xff"}']
)
def test_a_config_that_is_no_json_object_is_named(compressed, config):
    for folder in ("small", "tuned"):
        (compressed / folder / "config.json").write_bytes(config)
    for action in (
        lambda: fm_delta.verify(compressed / "small"),
        lambda: fm_delta.compress_checkpoint(compressed / "tuned", compressed / "base", compressed / "back"),
    ):
        with pytest.raises(CorruptFileError, match="config.json is not"):
            action()
    assert not (compressed / "back").exists()


@pytest.mark.parametrize("settings", ["{}", "null", "5", "[]", '"fm_delta"', '{"quant_method": "hf_ext.fm_delta"}'])
def test_the_files_name_the_base_where_the_config_does_not(compressed, settings):
    (compressed / "small/config.json").write_text(f'{{"quantization_config": {settings}}}')
    assert fm_delta.verify(compressed / "small") == 5
    (compressed / "small/config.json").unlink()
    assert fm_delta.verify(compressed / "small") == 5


# ---- another base ----------------------------------------------------------------------------------------------------


def test_a_base_that_cannot_be_read_is_named_with_what_to_do(compressed):
    (compressed / "none").mkdir()
    for name, message in (
        (compressed / "missing", "there is no folder .* Give the folder of the model"),
        (compressed / "none", "holds no safetensors weights"),
    ):
        with pytest.raises(BaseModelError, match=f"The base model '{compressed}/base' is needed.*{name}.*{message}"):
            fm_delta.verify(compressed / "small", base=name)


# ---- forgeries: files whose every checksum is right ------------------------------------------------------------------

FIXED = struct.Struct("<4sBBBBHHQQQ")  # docs/fm_delta_format.md describes it
FIELDS = "magic mode ndim dtype_bytes base_dtype_bytes name_bytes base_name_bytes base_values checksum".split()


def seal(payload: bytes) -> bytes:
    integrity = xxhash.xxh3_64_intdigest(payload[:28] + bytes(8) + payload[36:])
    return payload[:28] + integrity.to_bytes(8, "little") + payload[36:]


def forge(payload: bytes, replace: tuple[bytes, bytes] = (b"", b""), **changes) -> bytes:
    """The payload with other fields, and bytes in its first 100 replaced, under a checksum that is right."""
    fields = dict(zip(FIELDS, FIXED.unpack(payload[:36])[:-1], strict=True)) | changes
    return seal(FIXED.pack(*fields.values(), 0) + payload[36:136].replace(*replace, 1) + payload[136:])


def shaped(payload: bytes, *shape: int, **changes) -> bytes:
    """The payload with another shape."""
    fixed = forge(payload, ndim=len(shape), **changes)[:36]
    return seal(fixed + struct.pack(f"<{len(shape)}Q", *shape) + payload[36 + 8 * payload[5] :])


def payloads() -> tuple[bytes, bytes, bytes, RawTensor]:
    """One with a base, one alone, one stored, and the base."""
    base = {"a": torch.randn(20, 64, generator=torch.Generator().manual_seed(0))}
    tensor, twin = RawTensor.from_torch(fine_tune(base)["a"]), RawTensor.from_torch(base["a"])
    return encode_raw(tensor, twin, "a", "b"), encode_raw(tensor, name="a"), encode_raw(steps(), name="a"), twin


def steps() -> RawTensor:
    return RawTensor.from_torch(torch.tensor([[0x243F6A8885A308D3, 0x13198A2E03707344, 0x0C4E6C89A4093822]]))


def deflated(body: bytes | None = None) -> bytes:
    payload = encode_raw(RawTensor.from_torch(torch.arange(400)), name="a")
    return payload if body is None else seal(payload[: read_header(payload).body] + body)


def stacked(replace: tuple[int, bytes] = (0, b"")) -> bytes:
    """A payload of two matrices without a base, with other bytes from some place of its table on."""
    payload = encode_raw(RawTensor.from_torch(torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))), name="a")
    place = read_header(payload).body + replace[0]
    return seal(payload[:place] + replace[1] + payload[place + len(replace[1]) :])


def hostile_payloads() -> dict[str, bytes]:
    delta, alone, stored, _ = payloads()
    huge = 2**64 - 1
    count = huge.to_bytes(8, "little")
    kinds = {"delta": delta, "alone": alone, "stored": stored, "deflated": deflated(), "stacked": stacked()}
    modes = [(kind, mode) for kind, payload in kinds.items() for mode in (*range(9), 255) if mode != read_header(payload).mode]
    return {f"{kind} as mode {mode}": forge(kinds[kind], mode=mode) for kind, mode in modes} | {
        "more inflates": forge(deflated(), replace=(b"I64a", b"I32a")),
        "less inflates": deflated(zlib.compress(bytes(3199))),
        "a bomb": deflated(zlib.compress(bytes(1 << 24))),
        "no end": deflated(zlib.compress(bytes(3200))[:-1]),
        "something behind the end": deflated(zlib.compress(bytes(3200)) + b"x"),
        "a type of no known size": forge(deflated(), replace=(b"I64a", b"F99a")),
        "huge and deflated": shaped(deflated(), 1 << 40, 1 << 20),
        "unknown type": forge(alone, replace=(b"F32", b"F99")),
        "type that is not coded": forge(alone, replace=(b"F32", b"I32")),
        "narrower type": forge(stored, replace=(b"I64", b"I32")),
        "unknown base type": forge(delta, replace=(b"F32F32", b"F32F99")),
        "base type that predicts nothing": forge(delta, replace=(b"F32F32", b"F32I32")),
        "invalid utf-8": forge(stored, replace=(b"I64a", b"I64\xff")),
        "255 dimensions": forge(delta, ndim=255),
        "no dimensions": forge(delta, ndim=0),
        "long name": forge(stored, name_bytes=65535),
        "long texts": forge(delta, dtype_bytes=255, base_dtype_bytes=255, name_bytes=65535, base_name_bytes=65535),
        "no texts": forge(delta, dtype_bytes=0, base_dtype_bytes=0, name_bytes=0, base_name_bytes=0),
        "huge and alone": shaped(alone, 1 << 40, 1 << 20),
        "huge and stored": shaped(stored, 1 << 40, 1 << 20),
        "huge product": shaped(alone, huge, huge, huge, huge),
        "huge and with a base": shaped(delta, 1 << 40, 64),
        "huge row of no rows": shaped(alone, 0, huge),
        "huge row of no stored rows": shaped(stored, 0, huge),
        "no rows": shaped(delta, 0, 64, base_values=0),
        "4096 values a byte": shaped(alone, len(alone), 4096),
        "too many base values": forge(delta, base_values=1281),
        "far too many base values": forge(delta, base_values=huge),
        "base values of a stored one": forge(stored, base_values=12),
        "base values within a row": forge(delta, base_values=65),
        "base values without a base": forge(alone, base_values=1280),
        "no body": seal(alone[: read_header(alone).body]),
        "no stored body": seal(stored[: read_header(stored).body]),
        "half a body": seal(alone[: len(alone) // 2]),
        "two bodies": seal(alone + alone[read_header(alone).body :]),
        "a stack in a stack": stacked((0, b"\x04")),
        "unknown mode of a matrix": stacked((0, b"\x05")),
        "stored matrix of another size": stacked((0, b"\x00")),
        "matrix with a base that the stack lacks": stacked((1, b"\x01")),
        "matrix with base 2": stacked((1, b"\x02")),
        "checksum of another matrix": stacked((2, bytes(8))),
        "matrix beyond the end": stacked((10, count)),
        "sizes of matrices that do not add up": stacked((10, bytes(8))),
        "bytes behind the last matrix": seal(stacked() + b"x"),
        "stack of a vector": shaped(stacked(), 1 << 17),
        "stack of small matrices": shaped(stacked(), 512, 16, 16),
        "stack without matrices": shaped(stacked(), 0, 256, 256),
        "huge stack": shaped(stacked(), 1 << 40, 256, 256),
        "stack of huge matrices": shaped(stacked(), 2, 1 << 30, 1 << 30),
        "more matrices than the table": shaped(stacked(), 4, 256, 256),
        "checksum of another tensor": forge(stored, checksum=5),
        "checksum of another coded tensor": forge(alone, checksum=5),
        "no values of the base": forge(delta, base_values=0),
        "half of the base": forge(delta, base_values=640),
        "checksum of another delta": forge(delta, checksum=5),
        "short delta": seal(delta[:-30]),
        "huge base": shaped(delta, 1 << 40, 64, base_values=64 << 40),
        "huge rows": shaped(delta, 20, 64 << 50, base_values=1280 << 50),
        "200 dimensions of 1": shaped(delta, *[1] * 200, 1280),
        "another body": seal(delta[:200] + bytes(byte ^ 0x55 for byte in delta[200:])),
    }


HOSTILE = hostile_payloads()


@contextmanager
def little_memory(more: int = 256 * 1024 * 1024):
    """Lets this process have little more memory than it has now."""
    resource = pytest.importorskip("resource")
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pytest.skip("needs /proc")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_forged_payload_is_refused_without_much_memory(payload):
    twin = payloads()[-1]
    with little_memory(), pytest.raises((BaseModelError, CorruptFileError)):
        decode_raw(payload, twin)


def test_a_payload_of_a_later_version_says_so():
    payload = payloads()[0]
    with pytest.raises(CorruptFileError, match="format version 2, this hf_ext reads version 1: update hf_ext"):
        read_header(b"FMD\x02" + payload[4:])
    for other in (b"", b"FMD", b"FMD\x01", bytes(100), b"GGUF" + payload[4:]):
        with pytest.raises(CorruptFileError, match="not compressed by FM-Delta, or the file is damaged"):
            read_header(other)


def forge_file(path: Path, record: dict | str, tensors: dict[str, bytes] | None = None) -> None:
    """Rewrites a compressed file with another record and other payloads, every checksum right."""
    file, tensors = SafetensorsFile(path), tensors or payloads_of(path)
    text = record if isinstance(record, str) else json.dumps(json.loads(file.metadata["fm_delta"]) | record)
    entries, end = {}, 0
    for name, payload in tensors.items():
        shape = (*file.entries[name].shape[:-1], len(payload))
        entries[name] = Entry("U8", shape, end, end + len(payload))
        end += len(payload)
    metadata = file.metadata | {"fm_delta": text, "fm_delta_checksum": header_checksum(text, entries)}
    written = write_header(metadata, entries)
    path.write_bytes(len(written).to_bytes(8, "little") + written + b"".join(tensors.values()))


def payloads_of(path: Path) -> dict[str, bytes]:
    file = SafetensorsFile(path)
    return {name: file[name].data.tobytes() for name in file.entries}


def packed(header: bytes) -> str:
    return base64.b85encode(zlib.compress(header, 9)).decode()


def test_an_unchanged_forgery_is_read(compressed):
    kinds = {tensor.how for tensor in fm_delta.inspect(compressed / "small").tensors}
    assert kinds == {"delta", "resized", "alone", "stored"}
    forge_file(compressed / "small/model.safetensors", {})
    assert assert_right_or_refused(compressed)


@pytest.mark.parametrize("version", [2, 10**9])
def test_a_file_of_a_later_version_says_so(compressed, version):
    path = compressed / "small/model.safetensors"
    for record in ({"version": version}, json.dumps({"version": version, "all else": "may differ"})):
        forge_file(path, record)
        for read in READERS:
            with pytest.raises(CorruptFileError, match=f"has format version {version}, this hf_ext reads version 1: update"):
                read(compressed / "small")
    path.write_bytes(path.read_bytes().replace(b"may differ", b"may DIFFER"))  # and so may the checksum
    with pytest.raises(CorruptFileError, match="update hf_ext"):
        fm_delta.verify(compressed / "small")


BASE_RECORD = {"name": "bert", "revision": None, "fingerprint": ""}
RECORDS = {
    "no JSON": "{",
    "a list": "[]",
    "a number": "5",
    "deep": "[" * 50_000,
    "empty": "{}",
    "no base": json.dumps({"version": 1, "digest": "", "fingerprint": "", "header": packed(b"{}")}),
    "no fingerprint": json.dumps({"version": 1, "digest": "", "base": BASE_RECORD, "header": packed(b"{}")}),
    "version of another type": {"version": "later"},
    "version that never was": {"version": 0},
    "digest of another type": {"digest": 5},
    "digest of another save": {"digest": "0" * 32},
    "base of another type": {"base": "bert"},
    "base without fingerprint": {"base": {"name": "bert", "revision": None}},
    "base with more": {"base": BASE_RECORD | {"more": 1}},
    "header of another type": {"header": 5},
    "header that is not base85": {"header": '"'},
    "header that is not deflate": {"header": base64.b85encode(b"not deflate").decode()},
    "header cut short": {"header": packed(b"{}" + b" " * 1000)[:-5]},
    "header that is no JSON": {"header": packed(b"{")},
    "header that is a list": {"header": packed(b"[]")},
    "header that is deep": {"header": packed(b'{"a":' * 50_000)},
    "header without tensors": {"header": packed(b"{}")},
    "header with other metadata": {"header": packed(b'{"__metadata__": {"format": "tf"}}')},
    "header with metadata of another type": {"header": packed(b'{"__metadata__": [1]}')},
    "header that is a bomb": {"header": packed(b"{" + b" " * MAX_HEADER + b"}")},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_forged_record_is_refused_without_much_memory(compressed, record):
    forge_file(compressed / "small/model.safetensors", record)
    with little_memory(more=64 << 20):
        for read in READERS:
            with pytest.raises(CorruptFileError, match="model.safetensors"):
                read(compressed / "small")


def move(header: dict, to) -> None:
    for entry in list(header.values())[1:]:
        entry["data_offsets"] = [to(offset) for offset in entry["data_offsets"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["steps"].update(dtype="F64"),
        lambda header: header["steps"].update(dtype=None),
        lambda header: header["steps"].update(shape=[1, 3]),
        lambda header: header["steps"].update(shape=5),
        lambda header: header["steps"].update(data_offsets=[0, 24]),
        lambda header: header["steps"].update(data_offsets=[-24, 0]),
        lambda header: header["steps"].update(data_offsets=["0", "24"]),
        lambda header: header["steps"].update(data_offsets=[0]),
        lambda header: header["steps"].pop("data_offsets"),
        lambda header: header.update(steps=[]),
        lambda header: header.pop("steps"),
        lambda header: header.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda header: move(header, lambda offset: offset + 8),
        lambda header: move(header, lambda offset: offset * 2),
    ],
)
def test_a_forged_original_header_is_refused(compressed, change):
    path = compressed / "small/model.safetensors"
    header = json.loads(CompressedFile(path).original_header)
    change(header)
    forge_file(path, {"header": packed(json.dumps(header).encode())})
    for read in READERS:
        with pytest.raises(CorruptFileError, match="model.safetensors"):
            read(compressed / "small")


def test_a_payload_shaped_like_its_tensor_is_refused(compressed):
    path = compressed / "small/model.safetensors"
    data, file = path.read_bytes(), SafetensorsFile(path)
    body = data[8 + len(file.header_bytes) :]
    for change in ({"dtype": "I8"}, {"shape": (file["steps"].data.size,)}):
        entries = file.entries | {"steps": file.entries["steps"]._replace(**change)}
        checksum = header_checksum(file.metadata["fm_delta"], entries)
        for metadata, error in (
            (file.metadata, "checksum mismatch"),
            (file.metadata | {"fm_delta_checksum": checksum}, "'steps' in .* is not the one the file was written with"),
        ):
            header = write_header(metadata, entries)
            path.write_bytes(len(header).to_bytes(8, "little") + header + body)
            with pytest.raises(CorruptFileError, match=error):
                fm_delta.verify(compressed / "small")


def test_payloads_under_each_others_names_are_refused(compressed):
    path = compressed / "small/model.safetensors"
    tensors = payloads_of(path)
    forge_file(path, {}, tensors | {"a.weight": tensors["c.weight"], "c.weight": tensors["a.weight"]})
    with pytest.raises(CorruptFileError, match="Tensor 'a.weight' holds the data of 'c.weight'"):
        fm_delta.verify(compressed / "small")


@pytest.mark.parametrize("base", [{"name": 5}, {"name": None}, {"name": ["a"]}, {"revision": 5, "name": ""}])
def test_a_forged_base_is_refused(compressed, base):
    path = compressed / "small/model.safetensors"
    record = json.loads(SafetensorsFile(path).metadata["fm_delta"])
    forge_file(path, {"base": record["base"] | base})
    (compressed / "small/config.json").write_text(CONFIG)
    with pytest.raises(BaseModelError):
        fm_delta.verify(compressed / "small")


def test_every_error_is_ours_and_a_value_error():
    for kind in (CorruptFileError, BaseModelError, CheckpointError):
        assert issubclass(kind, HfExtError) and issubclass(kind, ValueError)
