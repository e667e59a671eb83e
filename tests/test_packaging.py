"""The published package contains all that it needs, and its metadata agree with the repository."""

import ensurepip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from tiny_checkpoints import weights, write_folder
from valid_cards import KINDS

import hf_ext

ROOT = Path(__file__).parents[1]
SOURCES = [path for path in (ROOT / "hf_ext").rglob("*") if path.suffix in (".py", ".pyi", ".typed", ".txt")]
PARTS = re.compile(r'"\s*\n\s*f?"')  # of one text of Python
COMMAND = re.compile(
    r"\b(?:(?:pip3?|pipx|uv|conda)\s(?:[\w-]+\s)*?(?:install|add|download|wheel)|uvx|pipx run)\s"
    r"(.*?)(?=[`;,()]|(?<=[\w'\"])\.\s|$)",
    re.MULTILINE,
)
OURS = re.compile(r"(?<![\w./:@-])hf[-_.]*ext\b(?!/)(\[[^]]*\])?+(?!\s*@)", re.IGNORECASE)


def from_an_index(text: str) -> list[str]:
    """The commands of a text that install this package by its name, which is nobody's on package indexes."""
    return [command for command in COMMAND.findall(text) if OURS.search(command)]


def setup(folder: Path, *commands: str, **environment: str) -> None:
    line = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), *commands]
    subprocess.run(line, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True, timeout=100)


def extras_of_setup() -> Mapping[str, str]:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings["options.extras_require"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    setup(folder, "sdist", "--dist-dir", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / f"hf_ext-{hf_ext.__version__}"


def test_the_sdist_has_all_that_builds_the_package_but_no_results_and_no_tests(sdist):
    needed = [path for folder in ("csrc", "model_cards") for path in (ROOT / folder).rglob("*") if path.is_file()]
    needed += [*SOURCES, *(ROOT / name for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff"))]
    assert len(needed) > 150
    for path in needed:
        name = path.relative_to(ROOT)
        assert (sdist / name).is_file() and (sdist / name).read_bytes() == path.read_bytes(), name
    assert not [path for path in sdist.rglob("*") if path.suffix in (".so", ".pyc", ".o") or path.name == "__pycache__"]
    assert not (sdist / "tests").exists()


def test_the_sdist_builds_the_package_of_the_checkout(sdist, tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=sdist, check=True, capture_output=True, timeout=100)
    built = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    cards = {f"hf_ext/model_cards/{kind}.md" for kind in KINDS}
    assert built == cards | {path.relative_to(ROOT).as_posix() for path in SOURCES}
    for extension in (ROOT / "hf_ext").glob("_native*"):
        shutil.copy(extension, tmp_path / "hf_ext")
    code = f"from hf_ext.integration import cards; assert all(map(cards._template, {sorted(KINDS)})); print(cards.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == str(tmp_path / "hf_ext/integration/cards.py")


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """A folder with the metadata of a package whose build names the repository."""
    folder = tmp_path_factory.mktemp("release")
    setup(folder, HF_EXT_REPOSITORY="https://host.example/me/hf_ext")
    return folder


def test_the_metadata_names_the_repository_of_the_build(release):
    metadata = message_from_string((release / "hf_ext.egg-info/PKG-INFO").read_text("utf-8"))
    files = f"https://host.example/me/hf_ext/blob/v{hf_ext.__version__}/"
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL"))
    assert urls["Source"] == "https://host.example/me/hf_ext" and urls["Changelog"] == f"{files}CHANGELOG.md"
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    inside = [link.removeprefix(files).partition("#")[0] for link in links if link.startswith(files)]
    assert "git clone https://host.example/me/hf_ext hf_ext" in metadata.get_payload()
    assert len(inside) > 10 and all((ROOT / path).exists() for path in inside)
    assert all(re.match(r"\w+:|#", link) for link in links)


def test_no_address_is_published_that_nobody_gave(tmp_path):
    setup(tmp_path, HF_EXT_REPOSITORY="")
    metadata = message_from_string((tmp_path / "hf_ext.egg-info/PKG-INFO").read_text("utf-8"))
    assert "Project-URL" not in metadata and metadata["Version"] == hf_ext.__version__


def test_no_text_installs_the_package_from_an_index():
    """Nobody has published the name: it would install the code of whoever registers it."""
    old = """Run `pip install hf_ext`, a plugin. | pip install 'hf_ext[dask]', and Dask | uv add "hf-ext>=1"
        wheel: pip install --force-reinstall --no-deps --only-binary hf_ext hf_ext. If | %pip install -q HF_Ext"""
    assert len(from_an_index(old)) == 5
    right = """pip install git+https://host/me/hf_ext | pip install 'hf_ext[all] @ git+https://host/me/hf_ext' |
        pip install '.[all]' | `pip install peft`, not `hf_ext` | pip install 'torch>=2.11'. hf_ext needs it"""
    assert not from_an_index(right)
    folders = "hf_ext csrc model_cards docs notebooks examples benchmarks constraints scripts .github".split()
    kinds = {".py", ".pyi", ".md", ".ipynb", ".txt", ".cfg", ".toml", ".yml", ".cff", ".h", ".cpp", ".sh", ""}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    texts = {path: path.read_text("utf-8") for path in paths if path.suffix in kinds and path.is_file()}
    assert len(texts) > 200
    assert {ROOT / name for name in ("README.md", "hf_ext/serving/sglang.py", "model_cards/emr.md")} < texts.keys()
    for path, text in texts.items():
        assert not from_an_index(PARTS.sub("", text)), path


@pytest.mark.parametrize("is_release", [False, True])
def test_written_files_name_the_repository_of_the_build(release, tmp_path, is_release):
    write_folder(tmp_path / "plain", weights())
    code = f"from hf_ext.cli.main import main; main(['compress', '{tmp_path}/plain', '--no-base', '--out', '{tmp_path}/small'])"
    path = os.pathsep.join([str(release)] * is_release + [str(ROOT), *sys.path])
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True, cwd=tmp_path, timeout=100)
    line = "(`pip install git+https://host.example/me/hf_ext`)" if is_release else ""
    for name in ("README.md", "config.json", "model.safetensors"):
        text = (tmp_path / "small" / name).read_bytes().decode("utf-8", "ignore")
        assert f"requires hf_ext, a plugin for Transformers and PEFT {line}".strip() in text, name
        assert ("pip install" in text) == is_release and not from_an_index(text)


def test_the_extra_all_covers_what_errors_recommend():
    extras = extras_of_setup()
    whole = Requirement(extras["all"].strip())
    before = list(extras)[: list(extras).index("all")]
    assert whole.name == "hf_ext" and whole.extras == set(before)
    listed = "\n".join([(ROOT / "hf_ext/requirements.txt").read_text(), *(extras[extra] for extra in before)])
    names = {Requirement(need).name for need in re.findall(r"^\w[^#\n]*", listed, re.MULTILINE)}
    texts = [PARTS.sub("", path.read_text("utf-8")) for path in (ROOT / "hf_ext").rglob("*.py")]
    commands = [command for text in texts for command in COMMAND.findall(text)]
    recommended = {name[1] for command in commands if (name := re.match(r"'?([a-z][\w-]*)", command))}
    assert {"torch", "pillow", "openai"} < recommended <= names


def write_wheel(folder: Path, name: str, version: str, metadata: str) -> None:
    """Writes a wheel without files, for pip to resolve."""
    info = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{info}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}.dist-info/METADATA", metadata)
        wheel.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}.dist-info/RECORD", "")


def test_the_pip_of_a_new_environment_installs_every_extra(release, tmp_path):
    """The pip of Python 3.11 finds an extra only by the normalized name that setuptools writes into the metadata."""
    text = (release / "hf_ext.egg-info/PKG-INFO").read_text("utf-8")
    metadata = message_from_string(text)
    extras, version = metadata.get_all("Provides-Extra"), metadata["Version"]
    write_wheel(tmp_path, "hf_ext", version, text)
    needed = {}
    for line in metadata.get_all("Requires-Dist"):
        need = Requirement(line)
        if need.name != "hf_ext":
            lower = [bound.version for bound in need.specifier if bound.operator == ">="]
            needed.setdefault(need.name, (lower or ["1"], set()))[1].update(need.extras)
    for name, (lower, more) in needed.items():
        provided = "".join(f"Provides-Extra: {extra}\n" for extra in sorted(more))
        write_wheel(tmp_path, name, lower[0], f"Metadata-Version: 2.1\nName: {name}\nVersion: {lower[0]}\n{provided}")
    wheel = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"), None)  # a distribution may keep it elsewhere
    pip = [sys.executable, f"{wheel}/pip"] if wheel else [sys.executable, "-m", "pip"]
    names = ",".join(extras_of_setup())  # as a user writes them
    options = ["--dry-run", "--ignore-installed", "--no-index", f"--find-links={tmp_path}", f"--report={tmp_path / 'out'}"]
    done = subprocess.run([*pip, "install", *options, f"hf_ext[{names}]"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "does not provide" not in done.stdout + done.stderr, done.stderr
    installed = json.loads((tmp_path / "out").read_text())["install"]
    assert sorted(names.split(",")) == sorted(extras)
    assert {item["metadata"]["name"] for item in installed} == {"hf_ext", *needed}


def test_the_citation_names_version_and_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == hf_ext.__version__
    assert len(citation["references"]) == 5


def test_the_changelog_has_this_version_first():
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
    assert re.fullmatch(rf"{re.escape(hf_ext.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", first)


def test_the_tools_of_commits_have_the_versions_of_the_tests():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    tools = {tool for hook in hooks for tool in hook["additional_dependencies"]}
    assert len(tools) >= 3 and tools <= set((ROOT / "constraints.txt").read_text("utf-8").splitlines())
