"""Move a LoRA from one base model to another without the task's data: Trans-LoRA on BIG-Bench Hard's web_of_lies.

    python examples/run_trans_lora.py --data DIR                    # about ten minutes on two cores, needs no Hub
    python examples/run_trans_lora.py --data DIR --filter none --num_samples 500 --output_dir unfiltered
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/run_trans_lora.py --data DIR

DIR is the folder bbh of BIG-Bench Hard (github.com/suzgunmirac/BIG-Bench-Hard). The script first trains two small base models
of different families (parts/tiny_language_models.py). Then it runs the two parts of a transfer:

  1. while the data are available: a LoRA of the source model learns the task, and a discriminator learns to recognize the
     task's inputs;
  2. without the data: the target model writes inputs from five seeds, the discriminator filters them, the source model with
     its LoRA answers them, and a LoRA of the target model learns the answers.

All models are tested on the 250 items of web_of_lies. The task's training data are 1,000 other items that a program writes in
the same form. All options of `TransLoraConfig`, which include those of Transformers' `TrainingArguments`, apply.
"""

from dataclasses import dataclass, field
from pathlib import Path

import parts.packages  # noqa: F401  # names a package that is missing
from accelerate import PartialState
from parts.tiny_language_models import TASK, World, base_models, is_puzzle, is_task_like
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import HfArgumentParser, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from hf_ext import TransLoraConfig, TransLoraTrainer, trans_lora
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import ModelGenerator
from hf_ext.trans_lora.scoring import answer_log_probs

TEMPLATE = "{input}\nAnswer:"
# What the LoRAs of both models, the discriminator and the transfer are trained with.
RECIPE = {"learning_rate": 1e-3, "per_device_train_batch_size": 32, "lr_scheduler_type": "linear", "warmup_steps": 20}


@dataclass
class Arguments:
    data: str = field(metadata={"help": "Folder with web_of_lies.json of BIG-Bench Hard."})
    models: str = field(default="tiny-models", metadata={"help": "Folder of the two base models; trained if not there."})
    num_real: int = field(default=1000, metadata={"help": "How much data the task has."})
    shorten: float = field(default=1.0, metadata={"help": "Share of the base models' training, to try the script out."})


@dataclass
class Training(TransLoraConfig):
    output_dir: str = field(default="trans-lora-out", metadata={"help": "Gets adapters, discriminator and report."})
    prompt_template: str = field(default=TEMPLATE, metadata={"help": "How both models are asked."})
    teacher_prompt_template: str = field(default=TEMPLATE, metadata={"help": "How the teacher is asked."})
    max_label_length: int = field(default=4, metadata={"help": "Tokens of an answer."})
    max_steps: int = field(default=300, metadata={"help": "Steps of each training."})
    learning_rate: float = field(default=RECIPE["learning_rate"], metadata={"help": "The initial learning rate."})
    per_device_train_batch_size: int = field(default=RECIPE["per_device_train_batch_size"], metadata={"help": "Batch size."})
    warmup_steps: float = field(default=RECIPE["warmup_steps"], metadata={"help": "Steps until the full learning rate."})
    generation_batch_size: int = field(default=64, metadata={"help": "Prompts at once."})
    save_strategy: str = field(default="no", metadata={"help": "When to write checkpoints."})
    report_to: str = field(default="none", metadata={"help": "Where to log to."})


def lora(model: nn.Module, **options) -> LoraConfig:
    modules = ["c_attn", "c_proj", "c_fc"] if model.config.model_type == "gpt2" else "all-linear"
    conv1d = model.config.model_type == "gpt2"
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=modules, fan_in_fan_out=conv1d, **options)


def learn(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: list[tuple[str, str]], args: TransLoraConfig, folder: Path
) -> PeftModel:
    """Returns a LoRA that learned the task from its data, in the usual way."""
    set_seed(args.seed)
    model = get_peft_model(model, lora(model))
    encoder = Encoder(tokenizer, model, TEMPLATE)
    samples = encoder.samples([encoder.prompt(text) for text, _ in data], [answer for _, answer in data])
    names = ("max_steps", "learning_rate", "per_device_train_batch_size", "warmup_steps", "seed", "use_cpu", "disable_tqdm")
    options = {name: getattr(args, name) for name in names} | {"save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments(output_dir=str(folder), remove_unused_columns=False, label_names=["labels"], **options)
    Trainer(model, arguments, encoder.batch, samples, processing_class=tokenizer).train()
    model.save_pretrained(folder)
    return model.eval()


def accuracy(model: nn.Module, tokenizer: PreTrainedTokenizerBase, test: list[tuple[str, str]]) -> float:
    """Returns the share of inputs for which the model writes the right answer in exactly these words."""
    encoder = Encoder(tokenizer, model, TEMPLATE)
    said = ModelGenerator(model, encoder, 125)([encoder.prompt(text) for text, _ in test], 4)
    return sum(one.text.strip() == answer for one, (_, answer) in zip(said, test)) / len(test)


def preference(model: nn.Module, tokenizer: PreTrainedTokenizerBase, test: list[tuple[str, str]]) -> float:
    """Returns the share of inputs for which the right one of Yes and No is likelier. This shows the knowledge of a model that
    answers in other words."""
    encoder = Encoder(tokenizer, model, TEMPLATE)
    prompts = [encoder.prompt(text) for text, _ in test]
    yes, no = (
        [float(row.sum()) for row in answer_log_probs(model, encoder, encoder.samples(prompts, [said] * len(test), False), 125)]
        for said in ("Yes", "No")
    )
    return sum((one > other) == (answer == "Yes") for one, other, (_, answer) in zip(yes, no, test)) / len(test)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    args, training = HfArgumentParser((Arguments, Training)).parse_args_into_dataclasses(arguments)
    out, world = Path(training.output_dir), World(Path(args.data))
    with training.main_process_first():
        source_path, target_path = base_models(Path(args.data), Path(args.models), args.shorten)
    (source, source_tokenizer), (target, target_tokenizer) = map(trans_lora.load_model, map(str, (source_path, target_path)))
    found = {
        "source model, Yes or No": preference(source, source_tokenizer, world.test),
        "target model, Yes or No": preference(target, target_tokenizer, world.test),
    }

    real = world.task_data(args.num_real, training.seed)
    teacher = learn(source, source_tokenizer, real, training, out / "source-lora")
    found["source model with its LoRA"] = accuracy(teacher, source_tokenizer, world.test)
    seeds = [text for text, _ in real[:5]]
    discriminator = trans_lora.train_discriminator(
        teacher,
        source_tokenizer,
        [text for text, _ in real],
        task=TASK,
        args=TransLoraConfig(**training.to_dict() | {"output_dir": str(out / "discriminator"), "num_samples": args.num_real}),
        peft_config=lora(source),
        seeds=seeds,
    )
    discriminator.save_pretrained(out / "discriminator")

    trainer = TransLoraTrainer(  # from here on, all that is known of the task are five inputs
        target,
        training,
        processing_class=target_tokenizer,
        teacher=teacher,
        teacher_processing_class=source_tokenizer,
        discriminator=discriminator,
        seeds=seeds,
        peft_config=lora(target),
    )
    trainer.train()
    trainer.save_model()
    found["target model, transferred"] = accuracy(trainer.model, target_tokenizer, world.test)
    if trainer.is_world_process_zero():
        candidates = trainer.synthesize()
        judged = [one for one in candidates if one.reason in (None, "filter")]
        kept = [one for one in judged if one.kept]
        print(trainer.report)
        print(f"\nof {len(candidates):,} inputs written, puzzles: {share(is_puzzle, candidates)}")
        print(
            f"like the task: {share(is_task_like, judged)} of those that were judged, {share(is_task_like, kept)} of those kept"
        )
        print("\nweb_of_lies of BIG-Bench Hard, accuracy:")
        for name, value in found.items():
            print(f"  {name:28} {100 * value:5.1f} %")
    return found


def share(check, candidates: list) -> str:
    return f"{100 * sum(check(one.input) for one in candidates) / max(1, len(candidates)):.1f} %"


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
