"""Loading: `quant_method` in config.json makes Transformers call a `HfQuantizer`, and the one here decodes the checkpoint.

The fast way decodes each payload when its turn comes (decoding.py). It depends on internals of Transformers. Where these have
changed, the plain way decodes to temporary files first, and Transformers loads those (plain_files.py). With HF_EXT_DECODED,
these files stay. Where the processes of a job shard the weights, one process of each node decodes to files for all of them.

The hooks below stand in the order in which `from_pretrained` calls them.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ext.errors import CheckpointError, CorruptFileError
from hf_ext.integration import compat, versions
from hf_ext.integration.loading import ranks, rehearsal
from hf_ext.integration.loading.plain_files import PlainFiles
from hf_ext.storage.safetensors_file import SafetensorsFile
from hf_ext.storage.source import TensorSource
from hf_ext.storage.weights import KEY

if TYPE_CHECKING:
    from hf_ext.integration.loading.decoding import Decoding

logger = logging.get_logger(__name__)

#: Methods that Transformers calls while it loads. If it called one of them otherwise, damaged weights could go unnoticed.
HOOKS = (
    "update_dtype",
    "preprocess_model",
    "_process_model_before_weight_loading",
    "update_weight_conversions",
    "postprocess_model",
    "_process_model_after_weight_loading",
)


class DecodingConfig(QuantizationConfigMixin):
    """The `quantization_config` in the config.json of a checkpoint that is stored relative to a base model.

    Args:
        base: folder or Hub id of the base model; None for the one that the files name, if any.
        revision: the base's commit on the Hub; None for a folder.
        dtype: torch's name of the weights' float type, for `dtype="auto"`.
    """

    #: The loaded model is an ordinary one: Transformers drops the quantizer once the weights are loaded.
    dequantize = True
    quant_method: str
    #: The `quantization_config` that `from_pretrained` was called with.
    requested: Any = None

    def __init__(self, base: str | None = None, revision: str | None = None, dtype: str | None = None, **kwargs):
        kwargs.pop("quant_method", None)
        self.quant_method = type(self).quant_method
        self.base = base
        self.revision = revision
        self.dtype = dtype
        for key, value in kwargs.items():  # a later version's settings: kept when the config is saved again
            setattr(self, key, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Reads the entry of a config.json. `from_pretrained(…, quantization_config=…)` then quantizes the decoded weights, or
        says how to load them if they are quantized."""
        if original := config_dict.get("quantization"):
            return compat.quantization_after_decoding(original, cls(**config_dict), AutoQuantizationConfig.from_dict)
        requested = compat.requested_quantization(AutoHfQuantizer)
        if requested is None or isinstance(requested, DecodingConfig):
            return super().from_dict(config_dict, return_unused_kwargs, **kwargs)
        logger.warning_once(
            f"The weights are decoded, then quantized as this {type(requested).__name__} says: it is not ignored."
        )
        kind: type[DecodingConfig] = compat.accepted_beside(requested, cls)
        return super(DecodingConfig, kind).from_dict(config_dict, return_unused_kwargs, **kwargs)


class DecodingForAnother:
    """A quantizer that decodes quantized weights for their own quantizer. The host that asks for the one gets the other."""

    auto: Any  # the host's class that makes a quantizer from its config

    def __new__(cls, quantization_config: Any = None, **kwargs: Any) -> Any:
        if not hasattr(quantization_config, "decoding"):
            return super().__new__(cls)
        ours, *_ = quantization_config.decoding
        theirs = cls.auto.from_config(compat.own_quantization(quantization_config), **kwargs)
        cls(ours, **kwargs).decode_for(theirs)  # type: ignore[call-arg]
        return theirs

    def decode_for(self, theirs: Any) -> None:
        """Lets another quantizer load the decoded weights. Its hooks are wrapped until they have run."""
        raise NotImplementedError


class DecodingQuantizer(DecodingForAnother, HfQuantizer):
    """Decodes a checkpoint while `from_pretrained` loads it.

    Attributes:
        plain: error message for a plain checkpoint that is loaded with this config.
        advice: what to do where weights cannot be decoded during loading.
        source: the checkpoint's weights; None if its files hold plain weights, against what its config.json says.
        then: the quantizer of the quantization that was requested of `from_pretrained`; None without one.

    Raises:
        BaseModelError: from `from_pretrained`, as the errors below: the base is missing, or is another model than the
            checkpoint was written against.
        CorruptFileError: a file is damaged, missing, from another save or from a newer version.
        CheckpointError: the weights have to be decoded to files (see above), and there is no room for them.
    """

    requires_calibration = False
    is_trainable = True
    quantization_config: DecodingConfig
    plain: str
    advice: str
    files: PlainFiles  # if there is a source
    auto = AutoHfQuantizer

    @abstractmethod
    def open(self, model: PreTrainedModel, files: list[Path]) -> TensorSource:
        """Returns the plain tensors that these files encode, by the names in the files."""

    def __init__(self, quantization_config: DecodingConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise CheckpointError(self.plain)
        self.source: TensorSource | None = None
        self.decoding: Decoding | None = None  # of the fast way
        self.then: HfQuantizer | None = None
        if quantization_config.requested is not None:
            self.then = AutoHfQuantizer.from_config(quantization_config.requested, pre_quantized=False)
            for method in ("update_device_map", "adjust_max_memory", "param_element_size", "param_needs_quantization"):
                setattr(self, method, getattr(self.then, method))

    def validate_environment(self, *args, **kwargs):
        _require_transformers(self.advice)
        if self.then is not None:
            self.then.validate_environment(*args, **kwargs)

    def decode_for(self, theirs: HfQuantizer) -> None:
        """Decodes to files, which the other quantizer loads."""
        hooks = {name: getattr(theirs, name) for name in ("validate_environment", "update_dtype", "preprocess_model")}

        def validate_environment(*args, **kwargs):
            self.validate_environment()
            hooks["validate_environment"](*args, **kwargs)

        def update_dtype(dtype: torch.dtype) -> torch.dtype:
            return hooks["update_dtype"](self.stored_dtype(dtype))

        def preprocess_model(model, checkpoint_files: list[str] | None = None, **kwargs):
            self._process_model_before_weight_loading(model, checkpoint_files)
            if self.source is not None and not self.files.are_in_use:
                self.files.use_temporary()
            hooks["preprocess_model"](model, checkpoint_files=checkpoint_files, **kwargs)

        def postprocess_model(model, **kwargs):
            for name in (*hooks, "postprocess_model"):
                delattr(theirs, name)
            theirs.postprocess_model(model, **kwargs)
            if self.source is not None:
                self.files.release(model)

        for hook in (validate_environment, update_dtype, preprocess_model, postprocess_model):
            setattr(theirs, hook.__name__, hook)

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type of the weights. For dtype="auto" without a dtype in config.json, Transformers takes the payloads'
        type, uint8."""
        if dtype == torch.uint8 and (stored := self.quantization_config.dtype) is not None:
            named = getattr(torch, stored, None) if isinstance(stored, str) else None
            if not isinstance(named, torch.dtype):
                raise CheckpointError(f"config.json is damaged: {stored!r} is not a dtype. Download or save the folder again.")
            return named
        return dtype

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        dtype = self.stored_dtype(dtype)
        return compat.zero3_dtype() or dtype if self.then is None else self.then.update_dtype(dtype)

    def preprocess_model(self, model, dtype: torch.dtype | None = None, device_map: Any = None, **kwargs):
        self.model, self.dtype = model, dtype
        self.devices = device_map.values() if isinstance(device_map, dict) else ()  # none if they are still to be chosen
        # Of the weights before a requested quantization changes their shapes.
        self.weights = model.state_dict(keep_vars=True)
        super().preprocess_model(model, dtype=dtype, device_map=device_map, **kwargs)
        if self.then is not None:
            self.then.preprocess_model(model, dtype=dtype, device_map=device_map, **kwargs)

    def _process_model_before_weight_loading(self, model, checkpoint_files: list[str] | None = None, **kwargs):
        # Transformers replaces errors during loading by a generic one, so everything that can be checked is checked here.
        names = checkpoint_files or []
        if compat.shards_while_loading(model):
            with ranks.together() as run:
                if all(run(lambda: self._open(model, names))):
                    self.files.use_shared(run)
        elif self._open(model, names) and not rehearsal.is_running():
            self.files.use_kept()
        return model

    def _open(self, model: PreTrainedModel, names: list[str]) -> bool:
        """Opens the files. Returns false if they hold plain weights."""
        files = [Path(name) for name in names if Path(name).suffix == ".safetensors"]
        if not files:
            raise CheckpointError(
                f"A checkpoint of {type(self.quantization_config).quant_method} is read from safetensors files, not from a "
                "state dict."
            )
        try:
            self.source = self.open(model, files)
            self.files = PlainFiles(names, self.source)
        except CorruptFileError:
            if not are_plain(files):
                raise
        return self.source is not None

    def update_parallel_plan(self, model, plan) -> None:
        """Does nothing, as decoding adds no parameters to the model. Transformers would walk through all parameters, twice."""

    def update_weight_conversions(self, weight_conversions: list, *args, **kwargs) -> list:
        if self.source is not None and not self.files.are_in_use:
            try:
                rehearsal.require_success()
                from hf_ext.integration.loading.decoding import Decoding

                self.decoding = Decoding(self, self.model, weight_conversions)
                return self.decoding.conversions
            except compat.HOST_CHANGED as error:
                if rehearsal.is_running():
                    raise
                compat.warn_of_plain_loading(error)
                self.files.use_temporary()
        # Transformers casts the plain weights that it loads, and quantizes them as requested.
        self.pre_quantized = False  # in Transformers 5.16, renamed weights would keep the type that they are stored in
        if self.then is not None:
            self.get_quantize_ops = self.then.get_quantize_ops
        return weight_conversions

    def loaded(self, target: str, names: dict[str, list[str]], converter: Any) -> None:
        """Called when the tensors `names` (by the converter's source pattern) have been decoded for the parameter `target`."""

    def postprocess_model(self, model, **kwargs):
        self.pre_quantized |= self.then is None  # so that Transformers removes this quantizer
        super().postprocess_model(model, **kwargs)
        if self.then is None:
            compat.partition_by_zero3(model)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.decoding is not None:
            self.decoding.finish(model)
        elif self.source is not None:
            self.files.release(model)
        self.model, self.weights = None, {}
        vars(model).pop("is_quantized", None)
        if self.then is not None:
            model.hf_quantizer, model.is_quantized = self.then, True
            model.quantization_method = self.then.quantization_config.quant_method
            self.then.postprocess_model(model, **kwargs)
        return model

    def is_serializable(self) -> bool:
        return True


def are_plain(files: list[Path]) -> bool:
    """Checks whether files of a folder that claims to be compressed hold plain weights, as of a model that was made with the
    configuration of a compressed checkpoint, and warns if so. Payloads are bytes, so damaged metadata does not make them
    plain."""
    headers = [SafetensorsFile(path) for path in files]
    if any(KEY in header.metadata or "U8" in {entry.dtype for entry in header.entries.values()} for header in headers):
        return False
    logger.warning(
        f"The weights in {files[0].parent} are plain, although its config.json says that they are compressed. They are "
        "loaded as they are. To correct the folder, remove `quantization_config` from its config.json."
    )
    return True


@cache  # looking the version up takes a millisecond
def _require_transformers(advice: str) -> None:
    versions.require("Loading this checkpoint", "transformers>=5.16.1", advice=advice)
    with compat.host_internals("Loading this checkpoint", advice):
        for hook in HOOKS:
            getattr(HfQuantizer, hook)
