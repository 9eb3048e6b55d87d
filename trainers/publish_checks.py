"""What must hold of a tree before it is uploaded; every broken rule is named with its file and a remedy."""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .convert_safetensors import ConversionError, read_checkpoint, read_header
from .publish_assemble import Tree
from .publish_card import CARD, PUBLICATION, CardError, check_card, counted_parameters
from .publish_manifest import MANIFEST, manifest_findings, tree_files
from .publish_sources import LICENSES


# Files of these kinds run code when they are read, or hold the same weights twice.
FORBIDDEN = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5", ".msgpack", ".onnx")
FORBIDDEN += (".gguf", ".dill", ".exe", ".dll", ".dylib", ".pyc")
TEXT_KINDS = (".py", ".json", ".jsonl", ".md", ".yaml", ".yml", ".toml", ".txt", ".jinja", ".csv", ".nix")
REMOTE_CODE_NEEDS = {"torch", "transformers", "tokenizers", "numpy", "PIL"}
LARGEST_FILE = 50 * 10**9
_MACHINE_PATH = re.compile(
    r"(?<![\w.~/:$}-])/(?:home|root|work|tmp|Users|mnt|data|workspace)/[\w.-]+|[A-Z]:\\\\?Users\\\\?\w+"
)
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
_MODEL_FILES = (
    "config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "tokenizer.json",
    "tokenizer_config.json", "processor_config.json", "chat_template.jinja", "1_Pooling/config.json",
    "2_Normalize/config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One broken rule: the file, what is wrong with it, and what to do."""

    where: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}; {self.remedy}"


def check_tree(tree: Tree) -> list[Finding]:
    """
    Checks a tree.

    Args:
        tree (`Tree`): what would be uploaded.

    Returns:
        `list[Finding]`: empty when all holds.
    """
    checks: list[Callable[[Path], Iterator[Finding]]] = [check_files, check_texts, check_header]
    if tree.kind in ("model", "plain"):
        checks += [check_weights, check_sentence_transformers]
    if tree.kind == "model":
        checks.append(check_remote_code)
    if tree.kind == "plain":
        checks.append(check_no_code)
    checks += [check_figures, check_manifest]
    return [
        Finding(f"{tree.repository}/{finding.where}", finding.rule, finding.remedy)
        for check in checks
        for finding in check(tree.folder)
    ]


def check_files(folder: Path) -> Iterator[Finding]:
    """Kinds and sizes of files: no pickle, safetensors alone, no link, nothing hidden."""
    kernel = (folder / "build.toml").is_file()
    for path in tree_files(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield Finding(name, "is a link", "copy the file that it points to")
            continue
        if any(part.startswith(".") or part == "__pycache__" for part in Path(name).parts):
            yield Finding(name, "is hidden or a cache", "remove it")
        suffix = path.suffix.lower()
        if suffix in FORBIDDEN or (suffix == ".so" and not kernel):
            yield Finding(name, f"is a {suffix} file", "publish weights as safetensors alone, and no other binaries")
        elif suffix not in (".png", ".so", ".safetensors"):
            with path.open("rb") as stream:
                start = stream.read(4)
            if start.startswith(_PICKLE):
                yield Finding(name, "holds a pickle or an archive", "remove it: reading it would run code")
        if path.stat().st_size > LARGEST_FILE:
            remedy = "write smaller weight files, such as 'moemb convert --max-shard-gb 4'"
            yield Finding(name, f"has {path.stat().st_size / 1e9:.0f} GB, more than the Hub takes", remedy)


def check_texts(folder: Path) -> Iterator[Finding]:
    """No path of the machine that it was made on and no access token in any text."""
    home = str(Path.home())
    for path in tree_files(folder):
        if path.suffix.lower() not in TEXT_KINDS or path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield Finding(name, "is not UTF-8", "save it as UTF-8")
            continue
        found = _MACHINE_PATH.search(text)
        where = found[0] if found else home if len(home) > 1 and f"{home}/" in text else None
        if where:
            line = text.count("\n", 0, text.index(where)) + 1
            remedy = "make the record again with relative paths"
            yield Finding(f"{name} line {line}", f"names the folder {where!r} of a machine", remedy)
        if _TOKEN.search(text):
            yield Finding(name, "holds an access token of the Hub", "remove it, and revoke the token")


def check_header(folder: Path) -> Iterator[Finding]:
    """The metadata of the card: what the Hub files a repository under."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
        header = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except (OSError, yaml.YAMLError, IndexError) as error:
        yield Finding(CARD, f"has no readable metadata ({error})", "publish again")
        return
    if not isinstance(header, dict):
        yield Finding(CARD, "has no metadata", "publish again")
        return
    kind = json.loads((folder / PUBLICATION).read_text(encoding="utf-8"))["kind"]
    needed = {"license", "library_name", "tags"} | ({"pipeline_tag"} if kind != "kernel" else set())
    needed |= {"base_model"} if kind in ("plain", "adapter") else set()
    for key in sorted(needed - {key for key, value in header.items() if value}):
        yield Finding(CARD, f"has no {key} in its metadata", "name it in card.yaml or by its flag")
    if header.get("license") and header["license"] not in LICENSES:
        yield Finding(CARD, f"has the licence {header['license']!r}", f"use an identifier: {', '.join(LICENSES)}")
    if header.get("model-index"):
        from huggingface_hub.repocard_data import model_index_to_eval_results

        try:
            model_index_to_eval_results(header["model-index"])
        except (KeyError, TypeError, ValueError) as error:
            yield Finding(CARD, f"has a model-index that the Hub cannot read ({error!r})", "publish again")


def check_weights(folder: Path) -> Iterator[Finding]:
    """Weights that the configuration describes, all of them and no others, in files that are whole."""
    try:
        stored = read_checkpoint(folder)
    except ConversionError as error:
        yield Finding("weights", str(error), "assemble again from whole weights")
        return
    for path in sorted(folder.glob("*.safetensors")):
        extra = [key for key in read_header(path) if key not in stored or stored[key].file != path]
        if extra:
            yield Finding(path.name, f"holds {len(extra)} tensors that the index does not name", "remove the old file")
    recorded = json.loads((folder / PUBLICATION).read_text(encoding="utf-8")).get("parameters")
    if recorded:
        text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
        counted = counted_parameters(folder, text["num_experts_per_tok"], text["num_experts"])
        for name, count in counted.items():
            # gates and other small additions come on top of what the architecture counts
            if abs(count - recorded[name]) > 0.01 * recorded[name]:
                rule = f"hold {count} {name} parameters, the card says {recorded[name]}"
                yield Finding("weights", rule, "publish the configuration that the weights were trained with")


def check_sentence_transformers(folder: Path) -> Iterator[Finding]:
    """The files without which Sentence Transformers would pool otherwise, or not load."""
    for name in _MODEL_FILES:
        if not (folder / name).is_file():
            yield Finding(name, "is missing", "assemble again")
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
        text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    except (OSError, ValueError, KeyError):
        return
    for module in modules:
        kind = module["type"]
        if not kind.startswith("sentence_transformers.") and not (folder / f"{kind.split('.')[0]}.py").is_file():
            yield Finding("modules.json", f"names {kind}, whose file is missing", "assemble again")
    if pooling.get("pooling_mode") != "lasttoken" or pooling.get("embedding_dimension") != text["hidden_size"]:
        rule = f"pools {pooling.get('pooling_mode')!r} over {pooling.get('embedding_dimension')} dimensions"
        yield Finding("1_Pooling/config.json", rule, f"use lasttoken over {text['hidden_size']}")


def check_remote_code(folder: Path) -> Iterator[Finding]:
    """The code is closed: what `auto_map` and `modules.json` name is there, and so is all that it imports."""
    roots = []
    for name in ("config.json", "processor_config.json"):
        entries = json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map") or {}
        wanted = {"config.json": {"AutoConfig", "AutoModel"}, "processor_config.json": {"AutoProcessor"}}[name]
        for missing in sorted(wanted - set(entries)):
            yield Finding(name, f"has no {missing} in its auto_map", "assemble again")
        roots += [(name, target) for target in entries.values()]
    for name, target in roots:
        if "--" in target:
            yield Finding(name, f"takes its code from another repository ({target})", "name a file of this one")
            continue
        module, _, wanted = target.partition(".")
        path = folder / f"{module}.py"
        tree = _parse(path)
        if tree is None:
            yield Finding(name, f"names {target}, and {path.name} is missing or no Python", "assemble again")
        elif not any(isinstance(node, ast.ClassDef) and node.name == wanted for node in tree.body):
            yield Finding(path.name, f"has no class {wanted}", "assemble again")
    for path in sorted(folder.glob("*.py")):
        yield from _check_imports(path, folder)


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _check_imports(path: Path, folder: Path) -> Iterator[Finding]:
    tree = _parse(path)
    if tree is None:
        yield Finding(path.name, "is no Python", "assemble again")
        return
    optional: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Try, ast.FunctionDef)):
            optional |= {id(child) for child in ast.walk(node)}
    allowed = REMOTE_CODE_NEEDS | set(sys.stdlib_module_names) | {"sentence_transformers"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > 1 or not (folder / f"{node.module}.py").is_file():
                rule = f"imports .{node.module}, which is not in the repository"
                yield Finding(f"{path.name} line {node.lineno}", rule, "assemble again")
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            if top in ("moemb", "modeling_moemb", "trainers"):
                yield Finding(f"{path.name} line {node.lineno}", f"imports {name}", "a repository has no such package")
            elif top not in allowed and id(node) not in optional:
                remedy = "guard it: it would become a demand on every user"
                yield Finding(f"{path.name} line {node.lineno}", f"imports {name}", remedy)


def check_no_code(folder: Path) -> Iterator[Finding]:
    """A plain variant runs no code of ours."""
    for path in sorted(folder.rglob("*.py")):
        yield Finding(path.relative_to(folder).as_posix(), "is code", "a plain variant has none")
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "auto_map" in json.loads(path.read_text(encoding="utf-8")):
            yield Finding(name, "has an auto_map", "a plain variant runs no code of its own")


def check_figures(folder: Path) -> Iterator[Finding]:
    """Every figure on the card is one that the files give."""
    try:
        check_card(folder)
    except (CardError, OSError, ValueError, KeyError) as error:
        yield Finding(CARD, str(error), "see `moemb.trainers.publish_card`")


def check_manifest(folder: Path) -> Iterator[Finding]:
    """Sizes and hashes of all files."""
    for name, rule in manifest_findings(folder):
        yield Finding(name, rule, f"assemble again; {MANIFEST} is written last")


def describe(findings: list[Finding], limit: int = 20) -> str:
    """Findings, one a line."""
    lines = [f"  {finding}" for finding in findings[:limit]]
    return "\n".join(lines + ([f"  and {len(findings) - limit} more"] if len(findings) > limit else []))


def open_tree(folder: Path, repository: str, repo_type: str = "model") -> Tree:
    """A tree that lies somewhere, for checking it again after a move."""
    about: dict[str, Any] = json.loads((folder / PUBLICATION).read_text(encoding="utf-8"))
    return Tree(repository, repo_type, about["kind"], folder)
