"""The kernels under test are staged from the sources of this checkout; without a compiler these tests skip and say so.

`moemb_cpu` is the loaded module. The stager reuses what is built already: after `make install` nothing is compiled.
"""

import sys
from pathlib import Path

import pytest

from .row_cases import poisoned
from .toy_kernels import make_compiled, make_noarch


KERNELS = Path(__file__).parents[2] / "hub_kernels"
sys.path.insert(0, str(KERNELS / "tools"))  # the tools are scripts, not a package


@pytest.fixture(scope="session")
def compiler() -> str:
    """Version line of the C++ compiler."""
    import compile_sources

    try:
        return compile_sources.find_compiler()[1]
    except compile_sources.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def moemb_cpu_build(compiler) -> Path:
    """The repository folder of moemb-cpu, staged."""
    import stage

    stage.stage(KERNELS / "moemb-cpu")
    return KERNELS / "moemb-cpu"


@pytest.fixture(scope="session")
def moemb_cpu(moemb_cpu_build):
    """The module of moemb-cpu; skipped on a CPU without AVX-512."""
    import kernels

    module = kernels.get_local_kernel(moemb_cpu_build, backend="cpu")
    if module.isa() == "none":
        pytest.skip("this CPU has no AVX-512")
    return module


@pytest.fixture
def poisoned_memory():
    """Fresh memory holds NaN, so that what a kernel forgets to write is seen."""
    with poisoned():
        yield


@pytest.fixture(scope="session")
def toy_build(compiler, tmp_path_factory) -> Path:
    """The compiled toy repository, staged; tests that change it copy it."""
    import stage

    repo = make_compiled(tmp_path_factory.mktemp("toy") / "moemb-toy")
    stage.stage(repo)
    return repo


@pytest.fixture(scope="session")
def plain_build(tmp_path_factory) -> Path:
    """The noarch toy repository, staged."""
    import stage

    repo = make_noarch(tmp_path_factory.mktemp("plain") / "moemb-plain")
    stage.stage(repo)
    return repo
