"""Analyze the inputs of a Trans-LoRA transfer as the paper does: variety, likeness to the seeds, distances, and a map.

    python benchmarks/trans_lora_inputs.py RUN --real real.jsonl --encoder all-mpnet-base-v2 --map inputs.png

RUN is the folder of a transfer, with synthesis.jsonl and transfer.json. The encoder is a sentence encoder of Transformers, such
as sentence-transformers/all-mpnet-base-v2, the paper's. It computes the embeddings.

  distinct    distinct-n (Li et al., arXiv 1510.03055): the share of different runs of n words
  words       number of words of an input: least, median, most
  MMD         maximum mean discrepancy (Gretton et al., JMLR 13, 2012; equation 5, biased) of unit embeddings to those of the
              seeds, and of real inputs if there are some; one Gaussian kernel, as wide as the median distance of all points
  nearest     the kept input that is most like each seed, by the Jaccard index of three-word runs: 1 is the same
  map         the first two principal components of the embeddings, drawn by matplotlib

Nothing of the real inputs is written, and no model is trained on them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from measuring import print_table
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ext.trans_lora import read_inputs

DRAWN = 1000  # inputs of a kind that are embedded
COLORS = {"dropped": "#ee6677", "kept": "#4477aa", "seeds": "black"}


def words_of(text: str) -> list[str]:
    """Returns the words and the single signs of a text, in lower case and without spaces."""
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def runs_of(text: str, n: int) -> list[tuple[str, ...]]:
    """Returns all runs of n words."""
    words = words_of(text)
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct(texts: Sequence[str], n: int) -> float:
    """Returns distinct-n: the share of different runs among all runs of n words; 0 without any."""
    runs = [run for text in texts for run in runs_of(text, n)]
    return len(set(runs)) / len(runs) if runs else 0.0


def jaccard(one: str, other: str) -> float:
    """Returns the Jaccard index of two texts' runs of three words. A shorter text is one run."""
    first, second = ({*runs_of(text, 3)} or {tuple(words_of(text))} for text in (one, other))
    return len(first & second) / len(first | second)


def mmd(x: torch.Tensor, y: torch.Tensor, width: float) -> float:
    """Returns the maximum mean discrepancy of two samples under the kernel exp(−‖a − b‖² / 2 width²), from 0 to √2.

    Args:
        x, y: (m, d) and (n, d).
    """
    points, m = torch.cat([x, y]).double(), len(x)
    kernel = torch.exp(-torch.cdist(points, points).square() / (2 * width**2))
    square = kernel[:m, :m].mean() + kernel[m:, m:].mean() - 2 * kernel[:m, m:].mean()
    return square.clamp_min(0).sqrt().item()


def median_distance(*samples: torch.Tensor) -> float:
    """Returns the median distance of all points of some samples, as the width of one kernel for all of them."""
    return torch.pdist(torch.cat(samples).double()).median().item()


def load_encoder(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a sentence encoder and its tokenizer from a folder or the Hub."""
    return AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)


@torch.inference_mode()
def embed(texts: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int = 32) -> torch.Tensor:
    """Returns the mean of the last hidden states over a text's tokens, at unit length: (texts, width), float32."""
    means = []
    for start in range(0, len(texts), size):
        rows = tokenizer(list(texts[start : start + size]), padding=True, truncation=True, return_tensors="pt")
        states, weights = model(**rows).last_hidden_state.float(), rows["attention_mask"][..., None].float()
        means.append((states * weights).sum(1) / weights.sum(1))
    return nn.functional.normalize(torch.cat(means), dim=-1)


def plane(points: torch.Tensor) -> torch.Tensor:
    """Returns the first two principal components of points, (n, d), as a map, (n, 2)."""
    centered = points.double() - points.double().mean(0)
    return centered @ torch.linalg.svd(centered, full_matrices=False)[2][:2].T


def draw_map(points: dict[str, torch.Tensor], path: Path) -> None:
    """Draws a map of the inputs of each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    spots = plane(torch.cat(list(points.values()))).split([len(part) for part in points.values()])
    for name, part in zip(points, spots):
        style = {"marker": "*", "s": 70} if name == "seeds" else {"marker": "o", "s": 9, "alpha": 0.5}
        axes.scatter(*part.T.tolist(), color=COLORS[name], label=name, linewidths=0, **style)
    axes.set(title="Map of the embeddings", xlabel="first principal component", ylabel="second", xticks=[], yticks=[])
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a transfer")
    parser.add_argument("--encoder", required=True, help="folder or Hub id of a sentence encoder")
    parser.add_argument("--real", type=Path, help="JSON lines of real inputs")
    parser.add_argument("--map", type=Path, help="draw the map to this file")
    args = parser.parse_args()
    written = [json.loads(line) for line in (args.run / "synthesis.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = {
        "dropped": [line["input"] for line in written if not line["kept"] and line["score"] is not None],
        "kept": [line["input"] for line in written if line["kept"]],
        "seeds": json.loads((args.run / "transfer.json").read_text(encoding="utf-8"))["inputs"]["seeds"],
    }
    texts = {name: part for name, part in texts.items() if part}
    draws = {name: random.Random(0).sample(part, min(len(part), DRAWN)) for name, part in texts.items()}
    encoder = load_encoder(args.encoder)
    points = {name: embed(part, *encoder) for name, part in draws.items()}
    targets = {"seeds": points["seeds"]} | ({"real inputs": embed(read_inputs(args.real), *encoder)} if args.real else {})
    width, rows = median_distance(*points.values()), []
    for name, part in texts.items():
        lengths = sorted(len(words_of(text)) for text in part)
        spread = f"{lengths[0]}, {statistics.median(lengths):.0f}, {lengths[-1]}"
        variety = " / ".join(f"{distinct(part, n):.3f}" for n in (1, 2, 3))
        distances = [f"{mmd(target, points[name], width):.3f}" for target in targets.values()]
        rows.append([name, str(len(part)), variety, spread, *distances])
    header = ["", "inputs", "distinct-1, 2, 3", "words", *(f"MMD to the {name}" for name in targets)]
    print_table(f"The inputs of {args.run}", header, rows)
    closest = [max((jaccard(seed, text), text) for text in texts["kept"]) for seed in texts["seeds"]]
    rows = [[seed, text, f"{likeness:.2f}"] for seed, (likeness, text) in zip(texts["seeds"], closest)]
    print_table("The kept input nearest to each seed", ["seed", "input", "Jaccard index"], rows)
    if args.map:
        draw_map(points, args.map)


if __name__ == "__main__":
    main()
