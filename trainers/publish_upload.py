"""Uploads trees with huggingface_hub: large files first, then one commit per repository, then the doors open.

1. Repositories that do not exist yet are created private (kernel repositories, which the client cannot open later, are
   created as they will be, and stay empty until their commit).
2. Weight files go to the Hub's storage, where nobody sees them until a commit names them. What is there already is not
   sent again, so a run that was interrupted goes on where it stood.
3. One commit per repository holds all of its files, and removes those that it no longer has. The branch `v1` (by its
   version) of a kernel repository, which `kernels.get_kernel(..., version=1)` asks for, follows with the same files.
4. Only when every commit is in do new repositories become public (unless they are to stay private).

So whatever stops a run, no public repository is ever half of what it should be.
"""

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .files import write_atomically
from .publish_assemble import Tree
from .publish_manifest import tree_files
from .publish_sources import PublishError


# Files that the Hub writes into a new repository.
HUB_FILES = (".gitattributes",)


class UploadError(PublishError):
    """The Hub refused, or the connection broke. The message says what is there and how to go on."""


def upload(
    trees: Sequence[Tree],
    *,
    journal: Path,
    message: str,
    private: bool = False,
    revision: str | None = None,
    api: Any = None,
) -> list[str]:
    """
    Publishes trees together.

    Args:
        trees (`Sequence[Tree]`): what to upload; the model last, so that what it names is there before it.
        journal (`Path`): file that remembers which repositories this publication has made, over interruptions.
        message (`str`): message of the commits.
        private (`bool`, *optional*, defaults to `False`): whether new repositories stay private.
        revision (`str`, *optional*): branch of the model repositories to commit to; `main` by default. A new one is
            made.
        api (`HfApi`, *optional*): the client; by default the user's, with the token of `hf auth login` or `HF_TOKEN`.

    Returns:
        `list[str]`: address of each commit.

    Raises:
        UploadError: the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = api or HfApi(library_name="moemb")
    _check_access(api, trees)
    for tree in trees:
        _guarded(tree, "create", lambda tree=tree: _create(api, tree, revision, private, journal))
    operations: dict[Tree, list] = {}
    with tqdm(trees, unit="repository", desc="Uploading files") as bar:
        for tree in bar:
            bar.set_postfix_str(tree.repository)
            branch = revision if tree.repo_type == "model" else None
            operations[tree] = _guarded(
                tree, "upload the files of", lambda tree=tree, branch=branch: _preupload(api, tree, branch)
            )
    commits: list[str] = []
    for tree in trees:
        branch = revision if tree.repo_type == "model" else None
        address, oid = _guarded(
            tree,
            "commit to",
            lambda tree=tree, branch=branch: _commit(api, tree, operations[tree], branch, message),
            commits,
        )
        commits.append(address)
        if tree.repo_type == "kernel":
            _guarded(
                tree, "set the version of", lambda tree=tree, oid=oid: _set_version(api, tree, oid, message), commits
            )
    if not private:
        made = _read_journal(journal)
        for tree in (tree for tree in trees if [tree.repo_type, tree.repository] in made):
            _guarded(tree, "make public", lambda tree=tree: _open(api, tree), commits)
    return commits


def _check_access(api: Any, trees: Sequence[Tree]) -> None:
    """Fails before anything is made when there is no token or it may not write where it should."""
    owners = {tree.repository.split("/")[0] for tree in trees}
    try:
        user = api.whoami()
    except Exception as error:  # the client raises errors of its own, of httpx, and of the token store
        raise UploadError(
            f"the Hub at {api.endpoint} does not know you ({_first_line(error)}); log in with 'hf auth login' or set "
            "HF_TOKEN to a token that may write. Nothing was published"
        ) from error
    known = {user.get("name"), *(org.get("name") for org in user.get("orgs") or [])}
    for owner in sorted(owners - known):
        raise UploadError(
            f"{user.get('name')} is no member of '{owner}' (of {', '.join(sorted(filter(None, known)))}); choose "
            "another --to. Nothing was published"
        )


def _guarded(tree: Tree, doing: str, call: Callable[[], Any], commits: Sequence[str] = ()) -> Any:
    """Runs a step; what goes wrong in it says how far the publication got."""
    try:
        return call()
    except UploadError:
        raise
    except KeyboardInterrupt:
        raise
    except Exception as error:  # errors of httpx, of the Hub and of the disk; all mean that this step did not happen
        state = (
            f"{len(commits)} repositories have their commit, new ones are still private"
            if commits
            else "No commit was made"
        )
        raise UploadError(
            f"could not {doing} {tree.repository} ({tree.repo_type}): {_first_line(error)}. {state}; run the same "
            "command again to go on: what is uploaded is not sent again"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _create(api: Any, tree: Tree, revision: str | None, private: bool, journal: Path) -> None:
    """Makes a repository unless it exists, and writes down that it is ours to open, before it is there."""
    kind = {"repo_id": tree.repository, "repo_type": tree.repo_type}
    if not api.repo_exists(**kind):
        closed = private or tree.repo_type == "model"
        if closed:
            made = _read_journal(journal)
            entry = [tree.repo_type, tree.repository]
            write_atomically(journal, json.dumps([*made, *([] if entry in made else [entry])]))
        api.create_repo(**kind, private=closed, exist_ok=True)
    if revision not in (None, "main") and tree.repo_type == "model":
        api.create_branch(tree.repository, repo_type=tree.repo_type, branch=revision, exist_ok=True)


def _read_journal(journal: Path) -> list[list[str]]:
    return json.loads(journal.read_text(encoding="utf-8")) if journal.is_file() else []


def _listed(api: Any, tree: Tree, revision: str | None) -> list[str]:
    return list(api.list_repo_files(tree.repository, repo_type=tree.repo_type, revision=revision))


def _preupload(api: Any, tree: Tree, revision: str | None) -> list[Any]:
    """Sends large files one by one; returns the operations of the commit to come."""
    from huggingface_hub import CommitOperationAdd

    additions = []
    files = list(tree_files(tree.folder))
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=tree.repository, leave=False) as bar:
        for path in files:
            name = path.relative_to(tree.folder).as_posix()
            additions.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)))
        # one call settles which files are large; each of these is then sent on its own
        small = [addition for addition in additions if not _is_large(addition.path_or_fileobj)]
        for batch in [small, *([addition] for addition in additions if addition not in small)]:
            api.preupload_lfs_files(
                tree.repository, additions=batch, repo_type=tree.repo_type, revision=revision, free_memory=False
            )
            bar.update(sum(Path(addition.path_or_fileobj).stat().st_size for addition in batch))
    return additions


def _is_large(path: Any) -> bool:
    return str(path).endswith((".safetensors", ".so", ".png"))


def _commit(api: Any, tree: Tree, additions: list[Any], revision: str | None, message: str) -> tuple[str, str]:
    """The one commit of a repository; returns its address and its id."""
    from huggingface_hub import CommitOperationDelete

    present = {addition.path_in_repo for addition in additions}
    gone = [name for name in _listed(api, tree, revision) if name not in present and name not in HUB_FILES]
    done = api.create_commit(
        tree.repository,
        operations=[*additions, *(CommitOperationDelete(path_in_repo=name) for name in gone)],
        commit_message=message,
        repo_type=tree.repo_type,
        revision=revision,
    )
    return str(done.commit_url), done.oid


def version_branch(folder: Path) -> str:
    """The branch that `kernels` finds a version of a kernel repository by."""
    settings = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))
    return f"v{settings['general']['version']}"


def _set_version(api: Any, tree: Tree, oid: str, message: str) -> None:
    """Lets the version's branch begin at the commit, or gives it the same files where it exists."""
    branch = version_branch(tree.folder)
    refs = api.list_repo_refs(tree.repository, repo_type=tree.repo_type)
    if branch in {ref.name for ref in refs.branches}:
        _commit(api, tree, _preupload(api, tree, branch), branch, message)
    else:
        api.create_branch(tree.repository, repo_type=tree.repo_type, branch=branch, revision=oid)


def _open(api: Any, tree: Tree) -> None:
    api.update_repo_settings(repo_id=tree.repository, repo_type=tree.repo_type, private=False)
