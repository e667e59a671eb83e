"""ms-swift's plugin for hf_ext: `--callbacks compress_checkpoints`.

swift sft --model my-model-small --dataset chats.jsonl --external_plugins examples/stacks/ms_swift_plugin.py \
    --tuner_type full --callbacks compress_checkpoints
"""

from swift.callbacks import callbacks_map

from hf_ext.fm_delta import CompressCheckpoints


def compress_checkpoints(args, trainer):
    callback = CompressCheckpoints()
    callback.on_init_end(args, trainer.state, trainer.control, model=trainer.model)  # ms-swift adds callbacks after the event
    return callback


callbacks_map["compress_checkpoints"] = compress_checkpoints
