"""Hooks of MkDocs (see mkdocs.yml), which make pages of files outside this folder.

- Each public module gets a page of the reference: everything in its `__all__`, what is called most first. mkdocstrings fills
  it from the docstrings.
- The help texts of `hf-ext` make a page of the command line.
- CHANGELOG.md and SECURITY.md become pages.
- A notebook becomes a page with its outputs, which offers the notebook for download.
- A link to a file outside this folder leads to a page that shows the file.
- Cells of wide tables know the heading of their column: on a phone, these tables are lists (assets/style.css).
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import posixpath
import re
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hf_ext.cli.main import app

ROOT = Path(__file__).parent.parent
MODULES = ("emr", "errors", "fm_delta", "pissa", "storage", "trans_lora", "uni_med", "weight_sync")
FIRST = {
    "emr": "merge add_task remove_task rename_task extract task report verify",
    "fm_delta": "enable disable compress_checkpoint decompress_checkpoint inspect verify switch open CompressCheckpoints "
    "extract_lora find_base compress_all",
    "pissa": "PissaConfig QPissaConfig",
    "storage": "open_checkpoint encode decode apply at_most_cores",
    "trans_lora": "train_discriminator TransLoraConfig TransLoraTrainer transfer Discriminator",
    "uni_med": "UniMedForConditionalGeneration UniMedProcessor UniMedConfig CMoEConfig UniMedCollator mix_datasets evaluate",
    "weight_sync": "PublishWeights Publisher Subscriber VLLMServer SGLangServer LocalCheckpoint follow",
}
ROOT_PAGES = ("CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")
LANGUAGES = {".py": "python", ".md": "markdown", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    made: dict[str, str | bytes] = {}
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(notebook)))
        made |= tutorial(notebook)
    made |= {
        "reference/index.md": overview(),
        "reference/cli.md": command_line(),
        **{f"reference/{module}.md": reference(module) for module in MODULES},
    }
    for page in files.documentation_pages():
        targets = {outside(page.src_uri, link) for link in LINK.findall(page.content_string)} - {"", *ROOT_PAGES}
        made = {f"{target}.md": source(target) for target in targets} | made
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri

    def replace(link: re.Match) -> str:
        if not (target := outside(uri, link[0])):
            return link[0]
        return posixpath.relpath(target if target in ROOT_PAGES else f"{target}.md", posixpath.dirname(uri) or ".")

    return LINK.sub(replace, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return re.sub(r"<table>.*?</table>", labeled, html, flags=re.DOTALL)


def labeled(table: re.Match) -> str:
    """Returns a table with its headings in each cell, if it has more than three columns, or three and sentences."""
    headings = [re.sub("<.*?>", "", text).replace('"', "&quot;") for text in re.findall(r"<th\b.*?>(.*?)</th>", table[0])]
    if len(headings) < 3 or len(headings) == 3 and not re.search(r"<td[^>]*>[^<]{40}", table[0]):
        return table[0]
    column = itertools.cycle(headings)
    return re.sub("<td", lambda _: f'<td data-label="{next(column)}"', table[0])


def outside(uri: str, link: str) -> str:
    """Returns the path from the root of the repository of a file outside docs/ that a page links to, or "" for other links."""
    origin = ROOT if uri in ROOT_PAGES else ROOT / "docs"
    path = Path(os.path.normpath(origin / posixpath.dirname(uri) / link))
    is_source = path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")
    return path.relative_to(ROOT).as_posix() if is_source else ""


def tutorial(notebook: Path) -> dict[str, str | bytes]:
    """Returns the page of a notebook, and the pictures on it, by their paths."""
    parts: list[str] = []
    pictures: dict[str, str | bytes] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        if len(parts) == 1:
            parts.append(f"[Download this notebook]({notebook.name}){{ download }}")
        printed, images = "", []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(pictures) + 1}.png"
                pictures[f"notebooks/{name}"] = base64.b64decode("".join(data["image/png"]))
                images.append(f"![Output of the cell above]({name})")
            else:
                printed += "".join(output.get("text") or data["text/plain"]).rstrip() + "\n"
        parts += [f"```text\n{printed}```"] * bool(printed) + images
    return {f"notebooks/{notebook.name}.md": "\n\n".join(parts), **pictures}


def source(path: str) -> str:
    """Returns a page that shows a file, and that the search does not find."""
    file = ROOT / path
    language = LANGUAGES.get(file.suffix, "text")
    head = "---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n"
    return f"{head}# {path}\n\n~~~~{language}\n{file.read_text(encoding='utf-8')}~~~~\n"


def overview() -> str:
    """Returns the first page of the reference: the modules, and the names that hf_ext itself has, too."""
    pages = {name: f"{module}.md#{where}" for module in MODULES for name, where in contents(module).items()}
    modules = [
        f"| [`hf_ext.{name}`]({name}.md) | {import_module(f'hf_ext.{name}').__doc__.splitlines()[0]} |" for name in MODULES
    ]
    names = ", ".join(f"[`{name}`]({pages[name]})" for name in public(import_module("hf_ext")))
    return "\n".join(
        [
            "# Reference",
            "",
            "All names on these pages are public. They load when they are first used.",
            "",
            "| module | |",
            "|---|---|",
            *modules,
            "",
            f"These names are in `hf_ext` itself: {names}.",
        ]
    )


def reference(module: str) -> str:
    """Returns the page of a public module."""
    text = import_module(f"hf_ext.{module}").__doc__
    return "\n\n".join([f"# hf_ext.{module}", text, *(f"::: {path}" for path in contents(module).values())])


def contents(module: str) -> dict[str, str]:
    """Returns the public names of a module, and of hf_ext those that the module defines, in the order of its page."""
    hf_ext = import_module("hf_ext")
    of_root = [name for name in public(hf_ext) if getattr(hf_ext, name).__module__.startswith(f"hf_ext.{module}.")]
    paths = {name: f"hf_ext.{name}" for name in of_root}
    paths |= {name: f"hf_ext.{module}.{name}" for name in public(import_module(f"hf_ext.{module}"))}
    return {name: paths[name] for name in dict.fromkeys((*FIRST.get(module, "").split(), *paths))}


def command_line() -> str:
    """Returns the page of the command line: the help of `hf-ext` and of each command."""
    group = typer.main.get_command(app)

    def help_of(command: Any, name: str, parent: Any = None) -> tuple[Any, str]:
        context = command.context_class(command, info_name=name, parent=parent, terminal_width=88)
        return context, f"```text\n{command.get_help(context).rstrip()}\n```"

    root, text = help_of(group, "hf-ext")
    parts = ["# Command line", text]
    for name, command in sorted(group.commands.items()):
        parts += [f"## hf-ext {name}", help_of(command, name, root)[1]]
    return "\n\n".join(parts)


def public(module: types.ModuleType) -> list[str]:
    """Returns a module's public names, without its submodules."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]
