"""ms-swift's plugin for hf_ext: `--tuner_type pissa` and `--callbacks compress_checkpoints`.

swift sft --model my-model-small --dataset chats.jsonl --external_plugins examples/stacks/ms_swift_plugin.py \
    --tuner_type pissa --lora_rank 16
swift sft --model my-model-small --dataset chats.jsonl --external_plugins examples/stacks/ms_swift_plugin.py \
    --tuner_type full --callbacks compress_checkpoints
"""

from peft import get_peft_model
from swift.callbacks import callbacks_map
from swift.tuner_plugin import PeftTuner, tuners_map

from hf_ext import PissaConfig
from hf_ext.fm_delta import CompressCheckpoints


class PissaTuner(PeftTuner):
    @staticmethod
    def prepare_model(args, model):
        return get_peft_model(model, PissaConfig(r=args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))


tuners_map["pissa"] = PissaTuner


def compress_checkpoints(args, trainer):
    callback = CompressCheckpoints()
    callback.on_init_end(args, trainer.state, trainer.control, model=trainer.model)  # ms-swift adds callbacks after the event
    return callback


callbacks_map["compress_checkpoints"] = compress_checkpoints
