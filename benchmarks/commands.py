"""Time whole commands and calls, in fresh processes with the imports in them, beside scripts of other codecs that do the same.

    pip install zstandard zipnn pcodec
    python benchmarks/commands.py lm/base lm/full lm/lora
    python benchmarks/commands.py lm/base lm/full lm/lora --instructions avx2    # as on an older processor

The folders are a causal language model and two fine-tunes of it, such as benchmarks/language_model.py makes. Each has one file,
model.safetensors, of the same types. Every process runs once a round, after an untimed round; figures are medians. A command
counts from the start of its process to the end. A call (sections/one_call.py) counts alone, and with its process, which imports
everything and loads the model.

The other codecs' scripts (sections/whole_file.py) read both files, code a tensor on each core and write, without checksums.
They and hf-ext must restore the fine-tune's file. Files are in the page cache. --instructions limits hf_ext and PyTorch, but
not NumPy and the other codecs. Other work on the machine makes PyTorch's threads wait for each other: trust only figures of a
quiet one.
"""

import argparse
import filecmp
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from measuring import print_table, size_of

from hf_ext.storage.delta import DEFAULT_LEVEL
from hf_ext.storage.native import _native

HERE = Path(__file__).parent
FILE = "model.safetensors"
PEERS = {"zstd -3 on the XOR": "zstd_xor_planes", "zipnn (no base)": "zip_nn", "pcodec": "pcodec_delta"}
LIMITED = """\
import runpy, sys
from hf_ext._native import use
use(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""


@dataclass
class Work:
    """A process to time: what Python runs, and what it writes.

    Attributes:
        wall, cpu: seconds of the process.
        call: the seconds and the CPU seconds of the call that the process makes and prints, if any.
    """

    arguments: list[str | Path]
    out: Path | None = None
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    call: list[list[float]] = field(default_factory=list)

    def run(self, environment: dict[str, str]) -> None:
        """Runs the process on a new `out`. Stops the benchmark if it fails."""
        if self.out and self.out.is_dir():
            shutil.rmtree(self.out)
        before, start = getrusage(RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([sys.executable, *self.arguments], env=environment, capture_output=True, text=True)
        wall, after = time.perf_counter() - start, getrusage(RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, self.arguments))}\n{done.stderr}")
        self.wall.append(wall)
        self.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if "sections.one_call" in self.arguments:
            self.call.append([float(seconds) for seconds in done.stdout.split()[-2:]])

    def forget(self) -> None:
        for seconds in (self.wall, self.cpu, self.call):
            seconds.clear()


def commands(args: argparse.Namespace, scratch: Path) -> dict[str, Work]:
    """Returns the commands of hf-ext and the scripts of the other codecs, in an order in which each finds what it reads."""
    base, tuned, other = args.base, args.fine_tune, args.other
    packed, merged = scratch / "packed", scratch / "merged"
    works = {}

    def add(name: str, *words: str | Path, out: Path | None = None) -> None:
        works[f"hf-ext {name}"] = Work([*started("hf_ext.cli", args.instructions), *words], out)

    for level, out in ((1, scratch / "packed-1"), (DEFAULT_LEVEL, packed)):
        name = "compress" if level == DEFAULT_LEVEL else f"compress --level {level}"
        add(name, "compress", tuned, "--base", base, "--level", str(level), "--out", out, out=out)
    add("decompress", "decompress", packed, "--out", scratch / "restored", out=scratch / "restored")
    add("verify", "verify", packed)
    add("inspect", "inspect", packed)
    add("--help", "--help")
    tasks = ["--task", f"one={tuned}", "--task", f"other={other}"]
    add("merge", "merge", "--base", base, *tasks, "--method", "emr", "--accept-conflicts", "--out", merged, out=merged)
    lora = scratch / "adapter"
    add("extract-lora --rank 32", "extract-lora", tuned, "--base", base, "--rank", "32", "--out", lora, out=lora)
    script, files = HERE / "sections/whole_file.py", (base / FILE, tuned / FILE)
    for name, codec in PEERS.items():
        out, restored = scratch / codec, scratch / f"{codec}-restored"
        works[f"{name}: compress"] = Work([script, "compress", codec, *files, out], out)
        works[f"{name}: decompress"] = Work([script, "decompress", codec, files[0], out, restored], restored)
    return works


def calls(args: argparse.Namespace, scratch: Path) -> dict[str, Work]:
    plain, packed, other, merged = args.fine_tune, scratch / "packed", scratch / "other", scratch / "merged"
    chosen = {
        "from_pretrained, plain": ("load", plain),
        "from_pretrained, compressed": ("load", packed),
        "set_task, the first": ("first_set_task", merged),
        "set_task, the next": ("next_set_task", merged),
        "fm_delta.switch": ("switch_to", packed, other),
    }
    return {name: Work([*started("sections.one_call", args.instructions), *words]) for name, words in chosen.items()}


def started(module: str, instructions: str | None) -> list[str]:
    """Returns Python's arguments to run a module, with an instruction set of choice."""
    return ["-c", LIMITED, instructions, module] if instructions else ["-m", module]


def environment(instructions: str | None) -> dict[str, str]:
    limits = {"ATEN_CPU_CAPABILITY": instructions, "ONEDNN_MAX_CPU_ISA": instructions.upper()} if instructions else {}
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | limits | {"PYTHONPATH": os.pathsep.join(paths)}


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else size_of(path, "*.safetensors")


def require_same(args: argparse.Namespace, scratch: Path) -> None:
    """Stops the benchmark unless everyone restores the fine-tune's file byte for byte."""
    for restored in (scratch / "restored" / FILE, *(scratch / f"{codec}-restored" for codec in PEERS.values())):
        if not filecmp.cmp(restored, args.fine_tune / FILE, shallow=False):
            raise SystemExit(f"{restored.relative_to(scratch)} differs from the fine-tune's file")


def report(args: argparse.Namespace, works: dict[str, Work], called: dict[str, Work]) -> None:
    original = size(args.fine_tune)
    median = {name: statistics.median(work.wall) for name, work in works.items()}
    share = {name: f"{100 * size(work.out) / original:.1f} %" for name, work in works.items() if work.out}
    limit = f", limited to {args.instructions}" if args.instructions else ""
    rows = []
    for name, work in works.items():
        speed = f"{original / 1e6 / median[name]:.0f}" if "compress" in name or "verify" in name else ""
        size_after = share.get(name, "") if "decompress" not in name else ""
        rows.append([name, f"{median[name]:.2f}", f"{statistics.median(work.cpu):.2f}", speed, size_after])
    title = f"{args.fine_tune} of {original / 1e6:.1f} MB, whole commands{limit}: medians of {args.repeats}"
    print_table(title, ["command", "s", "CPU s", "MB/s", "of the original"], rows)
    alone = {name: [statistics.median(seconds) for seconds in zip(*work.call)] for name, work in called.items()}
    rows = []
    for name, (wall, cpu) in alone.items():
        rows.append([name, f"{wall:.3f}", f"{cpu:.3f}", f"{statistics.median(called[name].wall):.2f}"])
    print_table(f"{args.fine_tune}, calls{limit}", ["call", "s", "CPU s", "with its process, s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("base", "fine_tune", "other"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that the medians are taken over")
    parser.add_argument("--instructions", choices=_native.instruction_sets()[1:], help="instruction set that hf_ext uses")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch, variables = Path(folder), environment(args.instructions)
        Work(["-m", "hf_ext.cli", "compress", args.other, "--base", args.base, "--out", scratch / "other"]).run(variables)
        works, called = commands(args, scratch), calls(args, scratch)
        for turn in range(args.repeats + 1):
            for name, work in (works | called).items():
                work.run(variables)
                print(f"round {turn}: {name} {work.wall[-1]:.2f} s", file=sys.stderr, flush=True)
                if not turn:
                    work.forget()
            require_same(args, scratch)
        report(args, works, called)


if __name__ == "__main__":
    main()
