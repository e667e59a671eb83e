"""Takes every architecture with a head that Transformers builds small through every operation, and prints a table.

    python benchmarks/architectures.py                                    all, about 17 minutes on two cores
    python benchmarks/architectures.py --only LlamaForCausalLM my-model   these classes, or folders of models

The operations are the tests of tests/test_architectures.py. A row of the table is a kind of head, with the number of models
for which an operation is right. Above it, the script lists what is wrong, what hf_ext refuses by an error that says so, what
Transformers or PEFT cannot do with a model themselves, and the classes that are not built.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from tiny_architectures import classes  # noqa: E402

#: The columns of the table, and the tests.
OPERATIONS = {
    "load": "compressed_checkpoints_load",
    "restore": "restored_byte_for_byte",
    "find base": "the_base_is_found",
    "switch": "models_switch",
    "save": "saved_as_plain",
    "weight sync": "published_and_followed",
    "merge": r"extracted\[.*-emr",
    "coded merge": r"extracted\[.*-switch",
    "LoRA": "extracted_lora.*False",
    "LoRA, modules": "extracted_lora.*True",
    "PiSSA": r"pissa.*-all-linear\]",
    "DoRA": "pissa.*DoRA",
    "convolutions": "pissa.*convolutions",
}
FEW = 10  # models of a kind, which then belongs to the row "other"


class Table:
    """Collects the outcomes of the tests, as a plugin of pytest."""

    def __init__(self) -> None:
        kinds = classes()
        count = Counter(kinds.values())
        self.kinds = {name: kind if count[kind] >= FEW else "other" for name, kind in kinds.items()}
        self.outcomes: dict[tuple[str, str], Counter] = defaultdict(Counter)
        self.reasons: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" or report.when == "setup" and report.passed:
            return
        test = report.nodeid.partition("@")[0]
        operation = next(name for name, pattern in OPERATIONS.items() if re.search(pattern, test))
        name = re.search(r"\[(.*?)(-emr|-switch|-True|-False|-all-linear.*|-convolutions)?\]", test)[1]
        outcome, reason = "right", dict(report.user_properties).get("refused")
        if report.failed:
            outcome, reason = "wrong", " ".join(re.findall("^E +(.*)", report.longreprtext, re.M)[:3])
        elif report.skipped:
            outcome, reason = "not possible in the hosts", report.longrepr[2].removeprefix("Skipped: ")
        elif reason:
            outcome = "refused"
        if report.when == "setup":
            outcome = "not built" if report.skipped else outcome
            self.reasons[outcome].add(f"{name}: {_short(reason)}")
            return
        self.outcomes[self.kinds.get(name, "models in folders"), operation][outcome] += 1
        if reason:
            self.reasons[outcome].add(f"{name}, {operation}: {_short(reason)}")

    def print(self) -> None:
        for outcome, reasons in sorted(self.reasons.items()):
            print(f"\n{outcome}: {len(reasons)}", *sorted(reasons), sep="\n    ")
        print("\n| Head |", *(f"{operation} |" for operation in OPERATIONS))
        print("|---|" + "---|" * len(OPERATIONS))
        kinds = sorted({kind for kind, _ in self.outcomes})
        rows = {kind: [self.outcomes[kind, operation] for operation in OPERATIONS] for kind in kinds}
        rows["all"] = [sum(column, Counter()) for column in zip(*rows.values())]
        for kind, row in rows.items():
            cells = [[f"{count['right']}", *(f"{count[x]} {x}" for x in ("refused", "wrong") if count[x])] for count in row]
            print(f"| {kind} |", *(f"{', '.join(cell)} |" for cell in cells))


def _short(reason: str) -> str:
    return " ".join(reason.split())[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["all"], help="names of classes of Transformers, or folders of models")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["ARCHITECTURES"] = ",".join(arguments.only)
    table = Table()
    options = ["-q", "--no-header", "--no-summary", "--disable-warnings", "-p", "no:cacheprovider", "--dist", "loadgroup"]
    code = pytest.main([str(TESTS / "test_architectures.py"), "-n", str(arguments.processes), *options], plugins=[table])
    table.print()
    sys.exit(code)


if __name__ == "__main__":
    main()
