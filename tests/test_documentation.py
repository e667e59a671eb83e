"""What the pages show runs, what they name exists, and what they link to is there."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import pytest
import typer
import yaml
from local_hub import LocalHub
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import MAKERS, ROOT, blocks, commands
from processes import python

import hf_ext
from hf_ext.cli import trans_lora
from hf_ext.cli.main import app

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
FOLDERS = ("docs", "examples", "benchmarks", "hf_ext", "tests")
MARKDOWN = [*sorted(ROOT.glob("*.md")), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
METHODS = ("fm_delta", "emr", "pissa", "trans_lora", "uni_med", "weight_sync")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
BROKEN = {
    "python.md": "A page.\n\n```python\nhere = 1\n```\n\nand\n\n```python\nprint(there)\n```\n",
    "sh.md": "```sh\nhf-ext --version\nhf-ext inspect nothing-there      # fails\n```\n",
}


def shown(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans(page: Path) -> list[str]:
    """The code within the lines of a page, each span on one line."""
    return [" ".join(span.split()) for span in SPAN.findall(re.sub(r"^```.*?^```$", "", shown(page), flags=re.M | re.S))]


WITH_BLOCKS = [page for page in PAGES if blocks(shown(page))]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The tracebacks of running all pages, and two that are broken, by path."""
    folder = tmp_path_factory.mktemp("pages")
    for name, text in BROKEN.items():
        (folder / name).write_text(text)
    with LocalHub() as hub:
        arguments = [folder / "results.json", *WITH_BLOCKS, *(folder / name for name in BROKEN)]
        env = hub.client_env(folder / "home", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        result = python(ROOT / "tests/pages.py", *arguments, env=env)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_every_block_runs(outcome, page):
    assert outcome[str(page)] == ""


@pytest.mark.slow
def test_a_block_that_does_not_run_is_noticed(outcome):
    broken = {Path(path).name: error for path, error in outcome.items()}
    assert 'python.md", line 10' in broken["python.md"] and "name 'there' is not defined" in broken["python.md"]
    assert "sh.md, in the block from line 2: hf-ext inspect nothing-there ends with 1" in broken["sh.md"]


def test_every_block_has_a_language_and_the_first_imports_the_package():
    for page in PAGES:
        assert shown(page).count("\n```") == 2 * len(blocks(shown(page))), page
        assert {block.language for block in blocks(shown(page))} <= {"python", "sh"}, page
        code = [block.text for block in blocks(shown(page)) if block.language == "python"]
        assert not code or "hf_ext" in code[0] or "without hf_ext" in shown(page), page


def test_lines_of_blocks_fit_on_the_page():
    for page in MARKDOWN:
        fenced = re.findall(r"^ *```.*?^ *```$", shown(page), re.M | re.S)
        assert [line for block in fenced for line in block.splitlines() if len(line) > 88] == [], page


@pytest.mark.parametrize("path", sorted((ROOT / "examples/stacks").iterdir()), ids=lambda path: path.name)
def test_files_for_other_stacks_use_names_that_exist(path):
    """Most of these stacks are not installed with the tests."""
    if path.suffix == ".yaml":
        assert yaml.safe_load(shown(path))["output_dir"] == "my-run"
        return
    imports = [node for node in ast.walk(ast.parse(shown(path))) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, name.name) for node in imports if node.module.startswith("hf_ext") for name in node.names]
    assert ours and all(hasattr(import_module(module), name) for module, name in ours)


def test_each_method_has_a_page_that_shows_it_from_both_sides():
    for method in METHODS:
        page = ROOT / f"docs/{method}.md"
        assert page.name in MAKERS and f"docs/{page.name}" in shown(ROOT / "README.md")
        assert "python" in {block.language for block in blocks(shown(page))}
        for heading in ("Usage", "Behavior", "Limitations"):
            assert f"\n## {heading}\n" in shown(page), heading


def test_commands_that_are_named_exist():
    for page in PAGES:
        lines = [words for block in blocks(shown(page)) if block.language == "sh" for words in commands(block.text)]
        for words in lines:
            check_command(words, strict=True)
        for span in spans(page):
            if span.startswith(("hf-ext ", "make ", "pip install ", "python ", "accelerate ")) and "…" not in span:
                check_command(shlex.split(span), strict=False)


command_line = cache(typer.main.get_command)


def check_command(words: list[str], strict: bool) -> None:
    """Asserts that what a command line names is there. Other programs are allowed in a sentence, but not in a block."""
    program, *rest = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if program == "hf-ext":
        group = command_line(app)
        if rest[0].startswith("-"):
            assert rest[0] == "--help" or any(rest[0] in option.opts for option in group.params), words
            return
        assert rest[0] in group.commands, words
        if rest[0] == "run":  # what follows is another program's
            return
        own = {"--help", *(name for option in group.commands[rest[0]].params for name in option.opts)}
        given = {word for word in rest[1:] if word.startswith("--")}
        parts = (trans_lora.TransferRequest, trans_lora.DiscriminatorRequest, trans_lora.NewAdapter, hf_ext.TransLoraConfig)
        of_trainings = {"--" + field.name.replace("_", "-") for part in parts for field in fields(part)}
        assert given <= own | of_trainings, words
    elif program == "make":
        targets = re.search(r"^\.PHONY: (.*)$", shown(ROOT / "Makefile"), re.M)[1].split()
        assert all(word in targets for word in rest if "=" not in word), words
    elif program == "pip":
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        extras = re.findall(r"(?:^|\s)\.\[([\w,-]+)\]", " ".join(rest))
        assert {*",".join(extras).split(",")} <= {"", *setup["options.extras_require"]}, words
    elif program in ("python", "accelerate"):
        if rest == ["launch"]:
            return
        if rest[:3] == ["launch", "-m", "hf_ext.cli"]:
            return check_command(["hf-ext", *rest[3:]], strict)
        [script] = [ROOT / word for word in rest if word.endswith(".py")]
        assert script.is_file(), words
        beside = "".join(shown(path) for path in script.parent.glob("*.py"))
        own = [word.removeprefix("--") for word in rest[rest.index(str(script.relative_to(ROOT))) :] if word.startswith("--")]
        assert all(re.search(rf"\b{option}\b", beside) for option in own), words
    elif program not in ("axolotl", "cp", "curl", "git", "hf", "rm", "sglang", "swift", "vllm"):  # not installed with the tests
        assert not strict, f"{words}: no test knows this program"


def test_names_of_the_package_that_are_mentioned_exist():
    for span in [span for page in PAGES for span in spans(page)]:
        for module, name in re.findall(rf"\b({'|'.join(METHODS)}|hf_ext)\.([A-Za-z_]+)\b(?![/.])", span):
            assert name in ("md", "py") or hasattr(getattr(hf_ext, module, hf_ext), name), span


def test_links_lead_somewhere():
    for page, target in [(path, target) for path in MARKDOWN for target in LINK.findall(shown(path))]:
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), target
        headings = re.findall(r"^#+ (.*)$", shown(file), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}, target


def public() -> list[tuple[str, object]]:
    modules = [hf_ext, *(getattr(hf_ext, method) for method in METHODS)]
    return [(name, getattr(module, name)) for module in modules for name in module.__all__]


def test_everything_public_has_a_docstring_of_its_own():
    for name, thing in public():
        if callable(thing):
            text = vars(thing).get("__doc__") or "" if isinstance(thing, type) else thing.__doc__ or ""
            assert text and not text.startswith(f"{name}("), name  # as dataclasses have it by themselves


def hiding_all_but(extra: str, folder: Path) -> str:
    """Returns a folder for PYTHONPATH that hides the packages which installing this package with an extra does not install."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = [*setup["options.extras_require"][extra].splitlines(), *(ROOT / "hf_ext/requirements.txt").read_text().splitlines()]
    needs = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    kept = {"hf-ext", "pip", "setuptools"}
    seen: set[str] = set()
    while needs:
        need = needs.pop()
        kept.add(canonicalize_name(need.name))
        for more in map(Requirement, () if str(need) in seen else metadata.requires(need.name) or ()):
            if more.marker is None or any(more.marker.evaluate({"extra": name}) for name in ("", *need.extras)):
                needs.append(more)
        seen.add(str(need))
    owners = {module: {*map(canonicalize_name, names)} for module, names in metadata.packages_distributions().items()}
    hidden = [module for module in owners if not kept & owners[module]]
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({hidden})\n")
    return str(folder)


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_is_complete(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    paths = os.pathsep.join((hiding_all_but("docs", tmp_path), str(ROOT)))  # as `make docs` has it in a fresh clone
    env = os.environ | {"PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    text = "".join(shown(path) for path in (tmp_path / "site/reference").glob("*.html"))
    names = {name for name, thing in public() if callable(thing)}
    assert names - set(re.findall(r'id="hf_ext\.(?:\w+\.)?(\w+)"', text)) == set()
    assert set(re.findall(r'(?:src|rel="stylesheet" href)="(https?:[^"]+)"', text)) == set()
    assert 'data-label="Platform"' in shown(tmp_path / "site/compatibility.html")  # on a phone, wide tables are lists


@pytest.mark.slow
def test_the_pictures_show_the_numbers_that_the_tables_have(tmp_path):
    script = [sys.executable, ROOT / "docs/pictures.py", tmp_path]
    result = subprocess.run(script, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for picture in drawn:
        words = [re.findall(r"<text .*?>(.*?)</text>", shown(path)) for path in (picture, ROOT / "docs/assets" / picture.name)]
        assert words[0] == words[1], f"{picture.name}: run python docs/pictures.py"


def readme_table(heading: str) -> list[list[str]]:
    section = shown(ROOT / "README.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]


def figures(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")))


def test_figures_of_the_readme_stand_on_the_page_of_benchmarks():
    numbers = figures(shown(ROOT / "docs/benchmarks.md") + shown(ROOT / "SECURITY.md"))
    promises = [row[2] for row in readme_table("What you get")] + [row[1] for row in readme_table("Results")]
    assert len(promises) > 10
    for promise in promises:
        for figure in figures(promise):
            digits = len(figure.partition(".")[2])
            assert any(f"{float(number):.{digits}f}" == figure for number in numbers), (promise, figure)
