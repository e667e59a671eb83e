"""axolotl's plugin for hf_ext: `adapter: pissa`, and compressed checkpoints where no adapter is trained (see axolotl.yaml)."""

from axolotl.integrations.base import AdapterCapabilities, BasePlugin
from peft import get_peft_model

from hf_ext import PissaConfig
from hf_ext.fm_delta import CompressCheckpoints


class Plugin(BasePlugin):
    def get_adapter_capabilities(self):
        return [AdapterCapabilities(name="pissa")]

    def load_adapter(self, model, cfg, inference=False, config_only=False):
        if cfg.adapter != "pissa":
            return None
        config = PissaConfig(r=cfg.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        return None if config_only else get_peft_model(model, config), config

    def add_callbacks_pre_trainer(self, cfg, model):
        return [] if cfg.adapter else [CompressCheckpoints()]
