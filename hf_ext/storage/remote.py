"""Safetensors files on the Hub that are not in the cache: their headers and tensors are downloaded in ranges of bytes."""

from __future__ import annotations

import re
import time
from itertools import count
from pathlib import Path

import numpy as np
from huggingface_hub import hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from hf_ext.errors import CheckpointError, CorruptFileError, HfExtError
from hf_ext.storage.hub import reaching
from hf_ext.storage.safetensors_file import MAX_HEADER, RawTensor, parse_header, require_valid

HEADER_START = 100_000  # bytes of the first request; most headers are shorter, as huggingface_hub has counted
TRIES = 5  # attempts for each range, if connections are lost or the server is busy
BUSY = (408, 429, 500, 502, 503, 504)  # the status of a busy server
LONGEST_WAIT = 300  # seconds to wait for a busy server, whatever it asks for
PATIENCE, SLOWEST = 60, 1000  # a range may take so many seconds, and one more for each SLOWEST bytes
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class RemoteFile:
    """A safetensors file of a repository on the Hub. Its tensors are downloaded each time they are read.

    Args:
        name: of the repository.
        file: the file's path there.
        commit: of the file.
        token: see `Hub`.

    Attributes:
        path: repository and file, for messages.

    Raises:
        BaseModelError: the file cannot be downloaded.
        CheckpointError: the server does not send parts of files.
        CorruptFileError: it is not a safetensors file.
    """

    def __init__(self, name: str, file: str, commit: str, token: str | bool | None):
        self.path = Path(name, file)
        self._name, self._file, self._commit, self._token = name, file, commit, token
        self._url = hf_hub_url(name, file, revision=commit)
        self._size: int | None = None  # of the file in bytes, as the server's first answer says
        start = self._download(0, HEADER_START)
        size, length = self._size or 0, int.from_bytes(start[:8].tobytes(), "little")
        try:
            if not 0 < length <= min(size - 8, MAX_HEADER):
                raise ValueError(f"its header cannot have {length} bytes")
            rest = [self._download(start.size, 8 + length)] if start.size < 8 + length else []
            self.header_bytes = np.concatenate([start, *rest])[8 : 8 + length].tobytes()
            self.metadata, self.entries = parse_header(self.header_bytes)
            require_valid(self.entries, size - 8 - length)
        except HfExtError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"{self.path} is not a readable safetensors file: {error}") from error

    def __getitem__(self, name: str) -> RawTensor:
        """Downloads a tensor."""
        entry = self.entries[name]
        return RawTensor(entry.dtype, entry.shape, self._part(entry.begin, entry.end))

    def rows(self, name: str, begin: int, end: int) -> RawTensor:
        """Downloads the rows from `begin` to `end` of a tensor."""
        entry = self.entries[name]
        row = entry.nbytes // max(entry.shape[0], 1)
        data = self._part(entry.begin + begin * row, entry.begin + end * row)
        return RawTensor(entry.dtype, (end - begin, *entry.shape[1:]), data)

    def beside(self, path: Path) -> RemoteFile:
        """Opens another file, by its path from this one's folder."""
        return RemoteFile(self._name, (Path(self._file).parent / path).as_posix(), self._commit, self._token)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Does nothing: a downloaded tensor is freed with its last reference."""

    def require_whole(self) -> None:
        """Does nothing: the file is not mapped."""

    def read_sparsely(self) -> None:
        """Does nothing: there is no read-ahead."""

    def _part(self, begin: int, end: int) -> np.ndarray:
        """Downloads the data of tensors from `begin` to `end`."""
        start = 8 + len(self.header_bytes)
        return self._download(start + begin, start + end)

    def _download(self, begin: int, end: int) -> np.ndarray:
        """Returns the bytes of the file from `begin` to `end`, or to the end of the file."""
        data = bytearray()  # grows with the data received, so that a forged size in a header reserves no memory
        with reaching(self._name, self._commit):
            for tries in count(1):
                try:
                    if begin + len(data) < end:
                        self._receive(begin, end, data)
                    return np.frombuffer(data, np.uint8)
                except HTTPError as error:
                    wait = _wait_after(error) if isinstance(error, HfHubHTTPError) else 1
                    if wait is None or tries == TRIES:
                        raise
                    time.sleep(wait)
        raise AssertionError("unreachable")

    def _receive(self, begin: int, end: int, data: bytearray) -> None:
        """Appends to `data`, which holds the bytes from `begin` on, those up to `end`."""
        first, began = begin + len(data), time.monotonic()
        headers = build_hf_headers(token=self._token) | {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        with http_stream_backoff(
            "GET",
            self._url,
            headers=headers,
            timeout=HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=(),  # it would wait as long as the server asks for
        ) as response:
            hf_raise_for_status(response)
            sent = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status_code != 206 or sent is None or int(sent[1]) != first:
                raise CheckpointError(
                    f"The server does not send parts of {self.path} (HTTP ranges), so its tensors cannot be read one by one. "
                    f"Download the model first: hf download {self._name}"
                )
            size = int(sent[3])
            self._size = self._size or size
            if size != self._size:
                raise CorruptFileError(f"{self.path} has changed on the server: it had {self._size} bytes, now {size}.")
            end = min(end, size)
            for chunk in response.iter_bytes():
                data += chunk
                if begin + len(data) > end:
                    break
                if time.monotonic() - began > PATIENCE + (begin + len(data) - first) / SLOWEST:
                    raise CheckpointError(
                        f"The server sends {self.path} too slowly. Download the model: hf download {self._name}"
                    )
        if begin + len(data) != end:
            raise CorruptFileError(f"The server sent {len(data)} bytes of {self.path} instead of {end - begin}. Try again.")


def _wait_after(error: HfHubHTTPError) -> float | None:
    """Returns the seconds to wait before another attempt; None if the server is not busy, but refuses the request."""
    if error.response.status_code not in BUSY:
        return None
    headers = error.response.headers
    seconds = re.search(r"(?:^|\bt=)([0-9]{1,9})", headers.get("Retry-After") or headers.get("RateLimit") or "")
    return min(int(seconds[1]) if seconds else 2, LONGEST_WAIT)
