"""Plain files of decoded weights, which Transformers loads in place of a checkpoint's own files, under the same names."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from hf_ext.errors import CheckpointError
from hf_ext.integration.loading import ranks
from hf_ext.storage.decoded import FOLDER, decoded_folder, place_for
from hf_ext.storage.plain_writer import write_files
from hf_ext.storage.safetensors_file import ComputedFile, SafetensorsFile
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import KEY, PARTS_OF

logger = logging.get_logger(__name__)


class PlainFiles:
    """The plain files of one checkpoint, for one load of it.

    Args:
        names: the checkpoint's files, in the list that `from_pretrained` reads after all hooks of a quantizer. The methods
            replace its entries by those of plain files.
        source: the weights that the files encode.

    Attributes:
        are_in_use: the list has the names of plain files.
    """

    def __init__(self, names: list[str], source: TensorSource):
        self.names, self.source, self.are_in_use = names, source, False
        self._held = ExitStack()  # the plain files in use

    def use_kept(self) -> None:
        """Loads the files that HF_EXT_DECODED keeps, and decodes them if there are none yet. Does nothing without a folder."""
        if (folder := self._kept()) is not None:
            self._use(folder)

    def use_temporary(self) -> None:
        """Decodes all weights to temporary files, and loads those. Raises CheckpointError if there is no room for them."""
        files = self._decoded()
        place = place_for(files)
        folder = self._held.enter_context(TemporaryDirectory(prefix="hf_ext-", dir=place, ignore_cleanup_errors=True))
        write_files(files, Path(folder), "Decoding")
        self._use(Path(folder))

    def use_shared(self, run: Callable[[Callable[[], Any]], list[Any]]) -> None:
        """Loads files that the first process of each node decodes for the others. They have no names, so that the system
        removes them with the last process that needs them, however it ends. `run` is that of `ranks.together`."""
        with ExitStack() as writing:
            nodes = run(ranks.node)
            first = nodes.index(ranks.node())
            folders = run(lambda: str(self._decode_for_node(writing)) if first == ranks.rank() else None)
            run(lambda: self._use(self._links_to(Path(folders[first]))))

    def release(self, model: PreTrainedModel) -> None:
        """Lets go of the files once a model is loaded, or once it is gone if it offloads weights to them."""
        if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
            weakref.finalize(model, self._held.close)
        else:
            self._held.close()

    def _use(self, folder: Path) -> None:
        self.names[:] = [str(folder / Path(name).name) for name in self.names]
        self.are_in_use = True

    def _decoded(self) -> list[ComputedFile]:
        files = []
        for opened in map(SafetensorsFile, map(Path, self.names)):
            names = [name for name in opened.entries if name in self.source]
            tensors = {name: self.source.entry(name)[:2] for name in names}
            metadata = {key: text for key, text in opened.metadata.items() if key not in (KEY, PARTS_OF)}  # torchao needs it
            files.append(ComputedFile(opened.path.name, tensors, self.source.read, {"format": "pt"} | metadata))
        return files

    def _kept(self) -> Path | None:
        if os.environ.get(FOLDER):
            try:
                return decoded_folder(self.source.digest, self._decoded(), self._held)
            except CheckpointError as error:
                logger.warning_once(f"{error} The weights are decoded in memory.")
        return None

    def _decode_for_node(self, writing: ExitStack) -> Path:
        """Returns a folder of plain files, of which the temporary ones stay until `writing` is closed."""
        if (kept := self._kept()) is not None:
            return kept
        files = self._decoded()
        place = place_for(files, shared=True)
        links = ranks.links_to({file.path.name: writing.enter_context(TemporaryFile(dir=place)) for file in files})
        folder = Path(writing.enter_context(links))
        write_files(files, folder, "Decoding")
        return folder

    def _links_to(self, folder: Path) -> Path:
        """Opens a folder's files, and returns a folder of links to them."""
        names = [Path(name).name for name in self.names]
        links = ranks.links_to({name: self._held.enter_context(open(folder / name, "rb")) for name in names})
        return Path(self._held.enter_context(links))
