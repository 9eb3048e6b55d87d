"""The seam to fast kernels, against small stand-in kernels: what is chosen, and what happens when it cannot be."""

import copy
import json
import logging
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import kernels
import pytest
import torch
from transformers.dynamic_module_utils import get_imports

from modeling_moemb import kernel_sources_moemb, kernels_moemb, kernels_report, use_kernels
from modeling_moemb.kernels_moemb import kernel, kernel_sources


# what a kernel needs to load; the tools that stage real ones have their own tests
INIT = """
NAME = "{mark}"
CONTRACT = 1


def swiglu(gate, up):
    return gate * up


def supports(op, *tensors):
    return op == "swiglu" and tensors[0].dtype.is_floating_point and tensors[0].shape[-1] == 4
"""
X = torch.ones(2, 4)


def make_kernel(folder: Path, mark: str, name: str = "moemb-cpu", backend: str = "cpu", init: str = INIT) -> Path:
    """A repository with one noarch variant."""
    from kernels._rust import Digest, DigestAlgorithm

    variant = folder / "build" / f"torch-{backend}"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(init.replace("{mark}", mark))
    metadata = {"name": name, "id": f"_seam_{mark}", "version": 1, "license": "Apache-2.0", "python-depends": []}
    metadata["backend"] = {"type": backend}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"] = {"algorithm": "sha256", "files": digest.files}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return folder


pytestmark = pytest.mark.usefixtures("no_kernels_chosen")


@pytest.fixture
def said(monkeypatch) -> list[tuple[int, str]]:
    """What the seam logs, as `(level, text)`."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))
    logger = kernels_moemb.logger
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def mark_of(op: str = "swiglu") -> str | None:
    function = kernel(op, X)
    return None if function is None else function.__globals__["NAME"]


def test_without_kernels_the_torch_path_runs_and_it_is_said_once(said):
    assert [kernel("swiglu", X), kernel("swiglu", X), kernel("experts", X)] == [None] * 3
    assert [level for level, _ in said] == [logging.INFO]
    assert "not staged in this environment: 'make install'" in said[0][1]


def test_why_the_installation_failed_is_passed_on(tmp_path):
    (tmp_path / "staged" / "moemb-cpu").mkdir(parents=True)
    status = {"state": "no-compiler", "message": "there is no C++ compiler\nmore"}
    (tmp_path / "staged" / "moemb-cpu" / "status.json").write_text(json.dumps(status))
    assert kernel_sources()[0].why == "not staged in this environment: there is no C++ compiler"


def test_the_staged_build_is_found(tmp_path, said):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "staged")
    assert mark_of() == "staged"
    assert torch.equal(kernel("swiglu", X, X)(X, X), X)
    assert kernel("experts", X) is None  # the kernel does not offer it
    assert [level for level, _ in said] == [logging.INFO]


@pytest.mark.parametrize("tensor", [torch.ones(2, 5), torch.ones(2, 4, dtype=torch.int64)])
def test_the_kernel_is_asked_for_every_call(tmp_path, tensor):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "asked")
    assert kernel("swiglu", tensor) is None and mark_of() == "asked"


class Quantised(torch.Tensor):
    """Says it is fp32, as quantised and distributed weights do, and holds something else."""


def test_tensors_that_hold_something_else_take_the_torch_path(tmp_path):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "plain")
    assert kernel("swiglu", X, torch.nn.Parameter(X)) is not None and kernel("swiglu", X, None) is not None
    assert kernel("swiglu", X, X.as_subclass(Quantised)) is None
    assert kernel("swiglu", X, torch.nn.Parameter(X.as_subclass(Quantised))) is None


@pytest.mark.parametrize("form", ["repository", "build folder", "variant"])
def test_a_path_goes_before_the_staged_build(tmp_path, form):
    make_kernel(tmp_path / "staged" / "moemb-cpu", f"behind-{form}")
    path = make_kernel(tmp_path / "given", f"given-{form}")
    path = {"repository": path, "build folder": path / "build", "variant": path / "build" / "torch-cpu"}[form]
    use_kernels(path)
    assert mark_of() == f"given-{form}"
    use_kernels("auto")
    assert mark_of() == f"behind-{form}"


def test_the_environment_variables(tmp_path, monkeypatch):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "variables-staged")
    redirected = make_kernel(tmp_path / "redirected", "variables-redirected")
    given = make_kernel(tmp_path / "given", "variables-given")
    monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel=/nowhere:moemb/moemb-cpu={redirected}")
    assert mark_of() == "variables-redirected"
    monkeypatch.setenv("MOEMB_KERNELS", f"{given}")
    use_kernels(None)
    assert mark_of() == "variables-given"
    monkeypatch.setenv("MOEMB_KERNELS", "off")
    use_kernels(None)
    assert mark_of() is None
    use_kernels("auto")
    assert mark_of() == "variables-redirected"


def test_a_kernel_of_another_name_is_asked_first(tmp_path):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "own")
    use_kernels([make_kernel(tmp_path / "mine", "mine", name="my-kernel")])
    assert mark_of() == "mine"
    assert [source.repository for source in kernel_sources()] == ["my-kernel", "moemb-cpu"]


def test_switching_off_and_back_loads_nothing_again(tmp_path, monkeypatch):
    use_kernels(make_kernel(tmp_path / "given", "switched"))
    function = kernel("swiglu", X)
    monkeypatch.setattr(kernel_sources_moemb, "_load_path", lambda *_: pytest.fail("loaded again"))
    previous = use_kernels("off")
    assert kernel("swiglu", X) is None
    assert use_kernels(previous) == kernel_sources_moemb.parse_source("off")
    assert kernel("swiglu", X) is function


def damage_nothing(variant: Path) -> None:
    (variant / "metadata.json").write_text("{")


def damage_digest(variant: Path) -> None:
    (variant / "__init__.py").write_text("x = 1")


@pytest.mark.parametrize(
    ("init", "damage", "message"),
    [
        (INIT, damage_digest, r"wrong digest in .*: .*__init__.py"),
        (INIT, damage_nothing, "metadata"),
        ("import no_such_module", None, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemError('broken here')", None, "SystemError: broken here"),
        ("def swiglu(gate, up): ...", None, r"it has no function supports\(op, \*tensors\)"),
        (INIT.replace("CONTRACT = 1", "CONTRACT = 0"), None, "it offers version 0 of the operations' signatures"),
        (INIT.replace("CONTRACT = 1", ""), None, "it offers version None of the operations' signatures"),
    ],
)
def test_a_broken_kernel_is_one_warning_with_path_and_remedy(tmp_path, said, init, damage, message, request):
    mark = "broken-" + request.node.callspec.id.replace("[", "").replace("]", "")
    path = make_kernel(tmp_path / "staged" / "moemb-cpu", mark, init=init)
    if damage:
        damage(path / "build" / "torch-cpu")
    assert [kernel("swiglu", X), kernel("swiglu", X), kernel("experts", X)] == [None] * 3
    ((level, text),) = said
    assert level == logging.WARNING and str(path) in text and "stage.py" in text and "MOEMB_KERNELS=off" in text
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)


def test_bytecode_that_another_process_writes_meanwhile_is_no_damage(tmp_path, monkeypatch):
    """Temporary files of `__pycache__` vanish between listing and hashing the folder."""
    path = make_kernel(tmp_path / "moemb-cpu", "busy")
    library, failures = kernel_sources_moemb._library(), [FileNotFoundError("x.pyc.1")] * 2

    def hash_variant(algorithm, variant):
        if failures:
            raise failures.pop()
        return library._rust.Digest.hash_variant(algorithm, variant)

    digest = SimpleNamespace(hash_variant=hash_variant)
    rust = SimpleNamespace(Metadata=library._rust.Metadata, Digest=digest)
    monkeypatch.setattr(kernel_sources_moemb, "_library", lambda: SimpleNamespace(_rust=rust))
    assert kernel_sources_moemb.check_digest(path / "build" / "torch-cpu") and not failures
    failures += [FileNotFoundError("gone for good")] * 5
    with pytest.raises(ValueError, match="gone for good"):
        kernel_sources_moemb.check_digest(path / "build" / "torch-cpu")


def test_a_path_without_a_build(tmp_path, monkeypatch, said):
    with pytest.raises(ValueError, match=r"'.*/empty' holds no kernel build"):
        use_kernels(tmp_path / "empty")
    monkeypatch.setenv("MOEMB_KERNELS", str(tmp_path / "empty"))
    assert kernel("swiglu", X) is None
    assert said[0][0] == logging.WARNING and "correct MOEMB_KERNELS" in said[0][1]


def test_a_build_for_another_device_only(tmp_path, said):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "elsewhere", backend="cuda")
    assert kernel("swiglu", X) is None
    assert said[0][0] == logging.INFO and "has no variant for cpu" in said[0][1]


def test_other_devices_have_no_kernels(tmp_path):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "meta")
    assert kernel("swiglu", X.to("meta")) is None


@pytest.mark.parametrize("module", [kernels_moemb, kernel_sources_moemb])
def test_the_kernels_package_is_no_demand_of_published_models(module):
    """transformers refuses to load a model whose files import a missing package, inside functions too."""
    assert "kernels" not in get_imports(module.__file__)


def test_the_kernels_package_is_optional(tmp_path, monkeypatch, said):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "no-library")
    monkeypatch.setitem(__import__("sys").modules, "kernels", None)
    assert kernel("swiglu", X) is None
    assert said[0][0] == logging.INFO and "pip install 'kernels" in said[0][1]


class FakeLibrary:
    """Records what is asked of the `kernels` package."""

    _rust = kernels._rust

    def __init__(self, error: Exception | None = None):
        self.calls = []
        self.error = error

    def get_kernel(self, repository, **arguments):
        self.calls.append((repository, arguments))
        if self.error is not None:
            raise self.error
        module = type(kernels_moemb)("hub_kernel")
        module.supports, module.swiglu, module.CONTRACT = lambda op, *tensors: True, lambda gate, up: up, 1
        return module


@pytest.fixture
def hub(monkeypatch) -> FakeLibrary:
    library = FakeLibrary()
    monkeypatch.setattr(kernel_sources_moemb, "_library", lambda: library)
    return library


def test_the_hub_is_asked_only_on_request(hub, monkeypatch):
    assert kernel("swiglu", X) is None and hub.calls == []
    use_kernels("hub", trust_remote_code=["moemb/moemb-cpu"])
    assert kernel("swiglu", X) is not None
    expected = {"version": 1, "backend": "cpu", "trust_remote_code": ["moemb/moemb-cpu"]}
    assert hub.calls == [("moemb/moemb-cpu", expected)]
    monkeypatch.setenv("MOEMB_KERNELS", "hub")
    use_kernels(None)
    kernel("swiglu", X)
    assert hub.calls[1][1]["trust_remote_code"] is False  # the variable asks, it does not vouch


def test_a_hub_that_refuses_is_a_warning_with_the_remedy(hub, said):
    hub.error = ValueError("publisher is not trusted")
    use_kernels("hub")
    assert kernel("swiglu", X) is None and kernel("experts", X) is None and len(hub.calls) == 1
    ((level, text),) = said
    assert level == logging.WARNING and "use_kernels('hub', trust_remote_code=['moemb/moemb-cpu'])" in text


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu"), ("cuda", None)])
def test_the_variant_follows_the_device_of_the_tensors(tmp_path, monkeypatch, device, backend):
    """A CUDA build of torch would take its CUDA variant for CPU tensors."""
    make_kernel(tmp_path / "given", f"device-{device}", name="moemb-experts", backend=device)
    asked = []
    library = FakeLibrary()
    library.get_local_kernel = lambda path, backend: asked.append(backend) or library.get_kernel("x")
    monkeypatch.setattr(kernel_sources_moemb, "_library", lambda: library)
    use_kernels(tmp_path / "given")
    kernel_sources(device)
    assert asked == [backend]


def test_threads_load_a_kernel_once(tmp_path, monkeypatch):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "threads")
    loads = []
    load = kernel_sources_moemb._load_path
    monkeypatch.setattr(kernel_sources_moemb, "_load_path", lambda *a: loads.append(a) or load(*a))
    found = []
    threads = [threading.Thread(target=lambda: found.append(kernel("swiglu", X))) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(loads) == 1 and len(set(found)) == 1 and found[0] is not None


def test_compiled_code_takes_the_choice_that_was_made_before(tmp_path):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "compiled")

    def run(x):
        function = kernel("swiglu", x, x)
        return x - 1 if function is None else function(x, x)

    with_choice = torch.full((2, 4), 3.0)
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(with_choice), with_choice - 1)
    assert mark_of() == "compiled"
    torch.compiler.reset()
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(with_choice), with_choice * 3)


def test_models_carry_nothing_of_it(tmp_path, tiny_model):
    init = (
        INIT.replace("== 4", "> 0").replace("    return gate", "    CALLS.append(1)\n    return gate")
        + "\nCALLS = []\n"
    )
    make_kernel(tmp_path / "staged" / "moemb-cpu", "model", init=init)
    batch = {"input_ids": torch.tensor([[3, 4, 5, 299]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        before = tiny_model(**batch).last_hidden_state
        calls = kernel("swiglu", X).__globals__["CALLS"]
        assert calls, "the model does not ask for the kernel"
        for twin in (copy.deepcopy(tiny_model), pickle.loads(pickle.dumps(tiny_model))):
            calls.clear()
            assert torch.equal(twin(**batch).last_hidden_state, before) and calls


def test_the_report_names_every_operation(tmp_path):
    make_kernel(tmp_path / "staged" / "moemb-cpu", "report", init=INIT.replace("== 4", "== 64"))
    rows = {row.op: row for row in kernels_report() if row.device == "cpu"}
    assert set(rows) == set(kernels_moemb.OPERATIONS)
    assert rows["swiglu"].source == "moemb-cpu" and rows["swiglu"].dtypes == ("float32", "bfloat16", "float16")
    assert rows["experts"] == kernels_moemb.KernelRow("experts", "cpu", (), "torch", "moemb-cpu does not offer it")


def test_the_report_says_when_a_kernel_refuses(tmp_path):
    refusing = INIT.replace("== 4", "== 3") + "\n\ndef isa():\n    return 'none'\n"
    make_kernel(tmp_path / "staged" / "moemb-cpu", "refuses", init=refusing)
    (row,) = [row for row in kernels_report() if row.op == "swiglu" and row.device == "cpu"]
    assert row.source == "torch" and row.why == "moemb-cpu refuses it (this CPU or its limit: none)"
