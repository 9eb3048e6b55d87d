"""Who may import whom (recipes -> trainers -> modeling_moemb -> transformers, torch), and how large things may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
MODEL_ROOM = sorted((ROOT / "modeling_moemb").glob("*.py"))
TRAINING_ROOM = sorted((ROOT / "trainers").glob("*.py"))
ROOMS = ["modeling_moemb", "trainers", "tests", "hub_kernels"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SHIPPED_DEMANDS = {"torch", "transformers", "tokenizers", "numpy", "PIL"}  # tokenizers comes with transformers


def imports(tree: ast.AST):
    """Yield `(level, module, names, node)` for every import below a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, [], node
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names], node


def guarded(tree: ast.AST) -> set[int]:
    """Ids of nodes inside functions or `try` blocks: the imports there are optional for the user."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Try, ast.FunctionDef)):
            inside |= {id(child) for child in ast.walk(node)}
    return inside


def python_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "build" not in path.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODEL_ROOM, ids=relative)
def test_model_room_is_remote_code(path):
    """transformers copies these files flat into a model repository: other forms of import are not found there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    optional = guarded(tree)
    for level, module, _, node in imports(tree):
        where = f"{relative(path)}:{node.lineno}"
        if level:
            assert level == 1 and re.fullmatch(r"\w+_moemb", module), f"{where}: only 'from .name_moemb import x'"
            assert (ROOT / "modeling_moemb" / f"{module}.py").is_file(), f"{where}: {module} is not in the room"
            continue
        top = module.partition(".")[0]
        assert top not in ("moemb", "modeling_moemb", "trainers", "hub_kernels"), f"{where}: imports another room"
        if id(node) in optional or top in sys.stdlib_module_names:
            continue
        allowed = SHIPPED_DEMANDS | ({"sentence_transformers"} if path.name.startswith("sentence_trans") else set())
        assert top in allowed, f"{where}: '{top}' would become a demand on every user of a published model"


def test_model_room_is_flat():
    folders = [p.name for p in (ROOT / "modeling_moemb").iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert folders == []


@pytest.mark.parametrize("path", TRAINING_ROOM, ids=relative)
def test_training_room_knows_the_model_room_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for level, module, names, node in imports(tree):
        where = f"{relative(path)}:{node.lineno}"
        top = module.partition(".")[0]
        if level:
            target = module or names[0]
            assert level == 1 and "." not in module, f"{where}: the room is flat; 'from .name import x'"
            assert (ROOT / "trainers" / f"{target}.py").is_file(), f"{where}: there is no trainers/{target}.py"
        else:
            assert top not in ("trainers", "moemb", "hub_kernels", "recipes", "tests"), (
                f"{where}: use a relative import"
            )


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_nobody_imports_trainers_by_folder_name(path):
    """`import trainers` from the checkout makes second copies of every class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for level, module, _, node in imports(tree):
        assert level or module.partition(".")[0] != "trainers", f"{relative(path)}:{node.lineno}: use moemb.trainers"


def test_recipes_hold_no_code():
    assert [relative(path) for path in (ROOT / "recipes").rglob("*.py")] == []


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, f"{relative(path)} has {text.count(chr(10))} lines: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # The docstring is for the reader of the signature and costs the reader of the body nothing.
            start = node.body[0].end_lineno if ast.get_docstring(node) is not None else node.lineno
            length = node.end_lineno - start
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno}: {node.name} has {length} lines"


def test_the_command_starts_without_the_heavy_libraries():
    """`moemb --help` must answer at once."""
    code = (
        "import sys; from moemb.trainers.cli import main; main(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_results_name_no_folder_of_the_machine_they_were_made_on():
    records = [path for path in (ROOT / "recipes").rglob("*.json*") if path.is_file()]
    assert len(records) > 5
    found = [
        (path.name, match)
        for path in records
        for match in re.findall(r"(?<![\w.~/])/(?:home|root|work|tmp|Users)/\S*", path.read_text())
    ]
    assert found == []
