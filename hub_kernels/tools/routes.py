"""Loads a staged kernel repository by every route that users take, in one process; prints a line per route.

    python hub_kernels/tools/routes.py hub_kernels/moemb-cpu

1. `kernels.get_local_kernel` on the repository;
2. `kernels.get_kernel` by its Hub id, sent to the folder by `LOCAL_KERNELS`;
3. `kernels.get_kernel` from a Hub cache, offline;
4. a layer for `kernels.kernelize`: `LocalLayerRepository` where torch's own backend has a variant, and a repository
   class that names the backend, which CPU kernels need beside a CUDA build of torch.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BackendLayerRepository:
    """A layer of a local repository for one backend.

    `kernels.LocalLayerRepository` always takes the backend of the torch build.

    Args:
        path (`Path`): the repository.
        layer_name (`str`): class in its `layers`.
        backend (`str`): `"cpu"` or the backend of the torch build.
    """

    path: Path
    layer_name: str
    backend: str

    def load(self) -> type:
        import kernels

        return getattr(kernels.get_local_kernel(self.path, backend=self.backend).layers, self.layer_name)


def layer_names(module) -> list[str]:
    """Layer classes that a kernel module offers."""
    import torch

    found = vars(module.layers).items()
    return sorted(name for name, value in found if isinstance(value, type) and issubclass(value, torch.nn.Module))


def make_hub_cache(repo: Path, hub_id: str, version: int, cache: Path) -> None:
    """Lay a repository out as the Hub client would after a download of `version`."""
    from huggingface_hub.file_download import repo_folder_name

    commit = "a" * 40
    folder = cache / repo_folder_name(repo_id=hub_id, repo_type="kernel")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / f"v{version}").write_text(commit)
    snapshot = folder / "snapshots" / commit / "build"
    shutil.copytree(repo / "build", snapshot, ignore=shutil.ignore_patterns(".*", "__pycache__"))


def check_routes(repo: Path, hub_id: str, version: int, backends: list[str]) -> list[str]:
    """Load `repo` by every route for each backend that this torch can select.

    Returns:
        `list[str]`: what was loaded, one line per route and backend.

    Raises:
        Exception: whatever the first route that fails raises; its note names the route.
    """
    import kernels

    own = kernels.backends._backend().name  # of the torch build, which routes without a backend argument take
    lines = []

    def route(name: str, load) -> None:
        try:
            lines.append(f"{name}: {load().__name__}")
        except Exception as error:
            error.add_note(f"route: {name}")
            raise

    os.environ["LOCAL_KERNELS"] = f"{hub_id}={repo}"
    for backend in [backend for backend in backends if backend in ("cpu", own)]:
        route(f"{backend}, path", lambda b=backend: kernels.get_local_kernel(repo, backend=b))
        route(f"{backend}, LOCAL_KERNELS", lambda b=backend: kernels.get_kernel(hub_id, version=version, backend=b))
        module = kernels.get_local_kernel(repo, backend=backend)
        for name in layer_names(module):
            route(f"{backend}, layer {name}", BackendLayerRepository(repo, name, backend).load)
            if backend == own:
                route(f"{backend}, stock layer {name}", kernels.LocalLayerRepository(repo, layer_name=name).load)
    del os.environ["LOCAL_KERNELS"]
    for backend in [backend for backend in backends if backend in ("cpu", own)]:
        # a copy in another folder of what is loaded already: the operators must not be registered twice
        route(f"{backend}, Hub cache", lambda b=backend: kernels.get_kernel(hub_id, version=version, backend=b))
    return lines


def main(argv: list[str]) -> int:
    repo = Path(argv[0]).resolve()
    with tempfile.TemporaryDirectory() as cache:
        # set before the libraries are imported: they read these once
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache, "KERNELS_CACHE": cache}
        from compile_sources import read_settings

        general = read_settings(repo)["general"]
        hub_id = general.get("hub", {}).get("repo-id", f"moemb/{general['name']}")
        make_hub_cache(repo, hub_id, general["version"], Path(cache))
        print("\n".join(check_routes(repo, hub_id, general["version"], general["backends"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
