"""Prints what runs with which versions, as a Markdown table, from the reports that `make test-matrix` leaves in a folder.

python scripts/matrix_table.py build/matrix
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

# Modules of tests by what they test, as pytest's reports name them; the first pattern that matches counts.
FEATURES = {
    "storage and the command line": r"tests\.(storage|test_(cli|hub_artifacts))|tests\.fm_delta\.test_"
    r"(folder_safety|folders|files|corruption|batch|report|base_search)",
    "FM-Delta": r"tests\.(fm_delta|adapters|lora_extraction)",
    "EMR": r"tests\.emr",
    "QPiSSA": r"tests\.pissa\.test_(qpissa|quantization)",
    "PiSSA": r"tests\.pissa",
    "Trans-LoRA": r"tests\.trans_lora",
    "Uni-Med": r"tests\.uni_med",
    "everything else": r"tests\.",
}
# Of a column's own lack of a package, not of a module of hf_ext that cannot be imported.
MISSING = re.compile(r"ModuleNotFoundError: No module named '(?!hf_ext)|requires matplotlib: pip install")


def outcomes(report: Path) -> dict[str, Counter]:
    """Counts the outcomes in a JUnit report, by feature. A test that needs a package which the column lacks is "absent"."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname") or case.get("name") or ""
        feature = next(feature for feature, pattern in FEATURES.items() if re.match(pattern, module))
        results = {child.tag for child in case}
        if any(MISSING.search(child.text or "") for child in case):
            outcome = "absent"
        else:
            outcome = "failed" if results & {"error", "failure"} else "skipped" if "skipped" in results else "passed"
        counts[feature][outcome] += 1
    return counts


def cell(counts: Counter) -> str:
    passed, failed = counts["passed"], counts["failed"]
    if not passed + failed:
        return "–"
    if counts["absent"] and not failed:
        return f"in part ({passed})"
    return f"yes ({passed})" if not failed else f"{passed} of {passed + failed}"


def main(folder: Path) -> None:
    columns = {path.stem: outcomes(path) for path in sorted(folder.glob("*.xml"))}
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for feature in FEATURES:
        print(f"| {feature} | {' | '.join(cell(column[feature]) for column in columns.values())} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
