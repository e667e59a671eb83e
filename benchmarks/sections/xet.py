"""Measure what the Hub's storage, Xet, stores and receives for fine-tunes of a base that it has: plain, and compressed by us.

Xet cuts files into chunks of 8 to 128 KB whose bounds follow from their contents, stores each distinct chunk once, and codes it
with LZ4, after grouping bytes where a heuristic advises it (github.com/huggingface/xet-core, chunking.rs and
compression_scheme.rs). The Hub's own client, hf_xet, does so here: it also writes to a folder.
"""

import argparse
import filecmp
import re
import tempfile
from pathlib import Path

import hf_xet
from fine_tunes import minilm
from measuring import print_table, size_of
from transformers import AutoModelForCausalLM, set_seed

from hf_ext.fm_delta import compress_checkpoint

WEIGHTS = "*.safetensors"
FROZEN = r"model\.(embed_tokens|layers\.1?\d)\."  # the first 20 of 30 layers


def xet(args: argparse.Namespace) -> dict:
    """Returns the bytes of weights that a store gets in addition to the base, as {what: {"plain", "Xet", "ours", …: bytes}}."""
    if args.lm is None:
        raise SystemExit("the section xet needs --lm, the folder that benchmarks/language_model.py makes")
    run = sorted(args.pairs.glob(f"{args.tasks[0]}-trainer/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if len(run) < 5:
        raise SystemExit("the section xet needs checkpoints; make them with benchmarks/fine_tunes.py --save_steps 34")
    smollm2, results = args.lm / "base", {}
    with tempfile.TemporaryDirectory() as scratch:
        cases = {"base": (None, [smollm2]), "base of the run": (None, [minilm()])}
        cases |= {name: (smollm2, tuned) for name, tuned in language_models(args.lm, Path(scratch)).items()}
        for name, (base, tuned) in (cases | {"five checkpoints of a run": (minilm(), run[-5:])}).items():
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                results[name] = added(base, tuned, Path(folder))
    rows = [
        [name, f"{sizes['plain'] / 1e6:.1f}", *(f"{size / 1e6:.1f} ({100 * size / sizes['plain']:.2f} %)" for size in coded)]
        for name, sizes in results.items()
        for coded in [list(sizes.values())[1:]]
    ]
    print_table("MB of weights in addition to the base", ["", *results["full"]], rows)
    return results


def language_models(lm: Path, folder: Path) -> dict[str, list[Path]]:
    """Returns the fine-tunes of SmolLM2, and two that are made of the full one: with frozen layers, and with 64 more tokens."""
    base, frozen, extended = (AutoModelForCausalLM.from_pretrained(lm / name) for name in ("base", "full", "full"))
    weights = {name: tensor for name, tensor in base.state_dict().items() if re.match(FROZEN, name)}
    frozen.load_state_dict(weights, strict=False)
    set_seed(0)
    extended.resize_token_embeddings(extended.config.vocab_size + 64)
    frozen.save_pretrained(folder / "frozen")
    extended.save_pretrained(folder / "extended")
    return {name: [lm / name] for name in ("full", "lora", "light")} | {
        "frozen layers": [folder / "frozen"],
        "more tokens": [folder / "extended"],
        "full, then more tokens": [lm / "full", folder / "extended"],
    }


def added(base: Path | None, tuned: list[Path], folder: Path) -> dict[str, int]:
    """Returns the bytes that folders of weights take beside their base."""
    packed = [folder / str(i) for i in range(len(tuned))]
    for source, target in zip(tuned, packed):
        compress_checkpoint(source, base, target, verify=True)
    return {
        "plain": sum(size_of(path, WEIGHTS) for path in tuned),
        "Xet": uploaded(base, tuned, folder / "xet"),
        "ours": sum(size_of(path, WEIGHTS) for path in packed),
        "ours through Xet": uploaded(base, packed, folder / "ours"),
    }


def uploaded(base: Path | None, folders: list[Path], store: Path) -> int:
    """Returns the bytes that Xet sends, and so stores, for the weights of folders after those of the base."""
    sent = [sent_for(path, store) for path in ([base] if base else []) + folders]
    return sum(sent[1:] if base else sent)


def sent_for(folder: Path, store: Path) -> int:
    """Uploads a folder's weights to a local store, and returns the bytes sent. Stops the run unless they come back."""
    session, endpoint, files = hf_xet.XetSession(), f"local://{store}", list(folder.glob(WEIGHTS))
    commit = session.new_upload_commit(endpoint=endpoint)
    handles = [commit.start_upload_file(str(file)) for file in files]
    sent = commit.wait_to_finish().dedup_metrics.total_bytes_uploaded
    for file, handle in zip(files, handles):
        back = store.with_suffix(".back")
        with session.new_file_download_group(endpoint=endpoint) as group:
            group.start_download_file(handle.result().xet_info, str(back))
        if not filecmp.cmp(file, back, shallow=False):
            raise SystemExit(f"Xet does not give back {file}")
    return sent
