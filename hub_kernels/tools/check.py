"""Checks that a kernel repository keeps the rules of the Hub's kernels, and that its build loads.

    python hub_kernels/tools/check.py [moemb-cpu ...]

Sources: build.toml is valid and lists every source; no flags for this one machine; Python imports relatively, from the
standard library, torch and declared packages alone; operators are registered in the namespace of the build; layers are
pure. Builds: digest, symbols that old systems have, and every route that loads them (`routes.py`).
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compile_sources import StageError, components, read_settings, unlisted_sources
from stage import planned_variants, repositories


# What manylinux_2_28 promises: the oldest systems that current torch wheels run on.
CEILINGS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
FORBIDDEN_FLAGS = ("-march=native", "-mtune=native", "-mcpu=native", "-static-libstdc++", "-ffast-math", "-Ofast")
LAYER_VARIABLES = {"has_backward", "can_torch_compile"}
# Functions of torch.library whose first argument is the qualified name of an operator.
NAMED_BY_OPERATOR = {
    "custom_op",
    "triton_op",
    "define",
    "impl",
    "register_fake",
    "register_autograd",
    "register_kernel",
}
NAMED_BY_OPERATOR |= {"register_vmap", "register_torch_dispatch", "register_autocast", "impl_abstract"}


@dataclass(frozen=True)
class Finding:
    """One broken rule.

    Args:
        where (`str`): file, and line where there is one.
        rule (`str`): what is wrong.
        remedy (`str`): what to do.
    """

    where: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}; {self.remedy}"


def check_sources(repo: Path) -> Iterator[Finding]:
    """Rules of build.toml, Python and C++ sources."""
    try:
        settings = read_settings(repo)
        sections = components(repo, settings) if "torch" in settings else []
    except StageError as error:
        yield Finding(str(repo / "build.toml"), str(error), "correct build.toml")
        return
    for section in sections:
        for flag in FORBIDDEN_FLAGS:
            if flag in section.flags:
                rule = f"[{section.name}] uses {flag}"
                yield Finding(str(repo / "build.toml"), rule, "name the instruction sets, portably")
    if sections:
        for source in unlisted_sources(repo, settings):
            yield Finding(str(repo / source), "is not listed in build.toml", "add it to the `src` of a section")
        for path in sorted((repo / "torch-ext").glob("*.cpp")):
            yield from check_binding(path)
    name = settings["general"]["name"].replace("-", "_")
    declared = {package.replace("-", "_") for package in settings["general"].get("python-depends", [])}
    for path in sorted((repo / "torch-ext" / name).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from check_imports(path, tree, declared, repo / "torch-ext" / name)
        yield from check_namespaces(path, tree)
        if path.name == "layers.py":
            yield from check_layers(path, tree)
    if not any((repo / "torch-ext" / name).glob("layers*")):
        yield Finding(str(repo / "torch-ext" / name), "has no `layers`", "add layers.py and import it in __init__.py")


def check_binding(path: Path) -> Iterator[Finding]:
    """Operators of C++ live in the namespace that the build gives."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"\b(?:STABLE_)?TORCH_LIBRARY\w*\s*\(\s*(\w+)", text):
        if match[1] != "TORCH_EXTENSION_NAME":
            line = text.count("\n", 0, match.start()) + 1
            rule = f"registers operators in the fixed namespace '{match[1]}'"
            yield Finding(f"{path}:{line}", rule, "use TORCH_EXTENSION_NAME: two versions must fit in one process")


def _guarded(tree: ast.AST) -> set[int]:
    """Ids of nodes in the body of a `try` that handles ImportError: what is imported there is optional."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_handles_import_error(handler) for handler in node.handlers):
            inside |= {id(child) for statement in node.body for child in ast.walk(statement)}
    return inside


def _handles_import_error(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception"})


def check_imports(path: Path, tree: ast.AST, declared: set[str], root: Path) -> Iterator[Finding]:
    """Relative inside the repository; else the standard library, torch (with triton) and declared packages."""
    optional = _guarded(tree)
    allowed = set(sys.stdlib_module_names) | {"torch", "triton"} | declared
    depth = len(path.relative_to(root).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > depth:
                yield Finding(f"{path}:{node.lineno}", "imports from outside the repository", "keep the kernel whole")
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            if top == root.name:
                yield Finding(f"{path}:{node.lineno}", f"imports '{name}' absolutely", "use a relative import")
            elif top not in allowed and id(node) not in optional:
                remedy = "drop it, guard it with `try ... except ImportError`, or declare it in python-depends"
                yield Finding(f"{path}:{node.lineno}", f"imports '{name}'", remedy)


def check_namespaces(path: Path, tree: ast.AST) -> Iterator[Finding]:
    """Operators of Python live in the namespace of the build, so that versions do not meet in `torch.ops`."""
    remedy = "use add_op_namespace_prefix and ops of ._ops"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            fixed = isinstance(node.args[0], (ast.Constant, ast.JoinedStr))
            if called.startswith("torch.library.") or called == "Library":
                function = called.rpartition(".")[2]
                if fixed and (function in NAMED_BY_OPERATOR or function == "Library"):
                    rule = f"{called} is given the fixed name {ast.unparse(node.args[0])}"
                    yield Finding(f"{path}:{node.lineno}", rule, remedy)
        fixed = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops"
        if fixed and node.attr not in ("aten", "higher_order", "load_library"):
            yield Finding(f"{path}:{node.lineno}", f"uses torch.ops.{node.attr}", remedy)


def check_layers(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Layers are forwards without a state: `kernelize` puts them into modules that exist already."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base) for base in node.bases}
        if not bases & {"nn.Module", "torch.nn.Module"}:
            rule = f"class {node.name} is no nn.Module"
            yield Finding(f"{path}:{node.lineno}", rule, "derive it from nn.Module, or move it to another file")
            continue
        methods = []
        for part in node.body:
            targets: set[str] = set()
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                methods.append(part.name)
            elif isinstance(part, ast.Assign):
                targets = {ast.unparse(target) for target in part.targets}
            elif isinstance(part, ast.AnnAssign) and part.value is not None:
                targets = {ast.unparse(part.target)}
            for target in sorted(targets - LAYER_VARIABLES):
                rule = f"{node.name} has the class variable {target}"
                yield Finding(f"{path}:{part.lineno}", rule, f"only {', '.join(sorted(LAYER_VARIABLES))} may be set")
        if methods != ["forward"]:
            rule = f"{node.name} defines {', '.join(methods) or 'nothing'}"
            yield Finding(f"{path}:{node.lineno}", rule, "a layer has one method, forward, and no __init__")


def check_builds(repo: Path) -> Iterator[Finding]:
    """Metadata, digest and symbols of every variant that build.toml asks for, then the routes."""
    from kernels._rust import Digest, Metadata

    settings = read_settings(repo)
    whole = True
    for name, backend in planned_variants(settings):
        variant = repo / "build" / name
        try:
            metadata = Metadata.read_from_file(variant / "metadata.json")
            if metadata.digest is None:
                raise ValueError("metadata.json holds no digest")
            metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
            if str(metadata.name) != settings["general"]["name"] or metadata.version != settings["general"]["version"]:
                raise ValueError(f"it is {metadata.name} {metadata.version}, build.toml says otherwise")
            if str(metadata.backend.backend_type).lower() != backend:
                raise ValueError(f"its backend is {metadata.backend.backend_type}, not {backend}")
        except Exception as error:
            text = "; ".join(map(str, getattr(error, "violations", []))) or str(error)
            yield Finding(str(variant), text, f"stage it again: python hub_kernels/tools/stage.py {repo.name}")
            whole = False
            continue
        for library in sorted(variant.glob("*.so")):
            yield from check_symbols(library)
    if whole:
        command = [sys.executable, str(Path(__file__).with_name("routes.py")), str(repo)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            yield Finding(str(repo), f"does not load by every route:\n{result.stderr.strip()}", "see the traceback")
        else:
            print("".join(f"  {line}\n" for line in result.stdout.splitlines()), end="")


def check_symbols(library: Path) -> Iterator[Finding]:
    """No symbol version beyond the ceilings, and no path of this machine in the library."""
    result = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True)
    if result.returncode:
        yield Finding(str(library), f"objdump failed: {result.stderr.strip()}", "install binutils")
        return
    for line in result.stdout.splitlines():
        for family, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", line):
            if tuple(map(int, version.split("."))) > CEILINGS[family]:
                limit = ".".join(map(str, CEILINGS[family]))
                rule = f"needs {line.split()[-1]} of {family}_{version}"
                yield Finding(
                    str(library), rule, f"use nothing newer than {family}_{limit} (torch_binding.h says how)"
                )
    headers = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True).stdout
    for match in re.finditer(r"^\s*(RPATH|RUNPATH)\s+(\S+)", headers, re.MULTILINE):
        yield Finding(str(library), f"carries the {match[1]} {match[2]}", "link without -rpath")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repos", nargs="*", help="folder names below hub_kernels/ (default: all)")
    parser.add_argument("--sources", action="store_true", help="do not look at builds")
    args = parser.parse_args(argv)
    count = 0
    for repo in repositories(args.repos):
        print(repo.name)
        findings = list(check_sources(repo))
        if not args.sources and not findings:
            findings += check_builds(repo)
        for finding in findings:
            print(f"  {finding}", file=sys.stderr)
        count += len(findings)
    print(f"{count} findings" if count else "no findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
