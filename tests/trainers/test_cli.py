import errno
import sys
import types
from pathlib import Path

import pytest

from moemb.trainers import cli
from moemb.trainers.errors import MoEMBError


@pytest.fixture
def verb(monkeypatch):
    """A verb `probe` that records its arguments; `module` attributes can be changed by the test."""
    module = types.ModuleType("moemb.trainers.probe")
    module.HELP = "probe"
    module.seen = []
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int, required=True)

    def run(args):
        module.seen.append(args)
        return 0

    module.run = run
    monkeypatch.setitem(sys.modules, "moemb.trainers.probe", module)
    monkeypatch.setattr(cli, "VERBS", {"probe": "probe"})
    monkeypatch.setattr(cli, "help_line", lambda name: "probe")
    return module


@pytest.mark.parametrize("flags", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb_with_one_line(flags, capsys):
    assert cli.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in cli.VERBS:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert cli.help_line(name) in line and len(line) <= 119


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moemb ")


def test_an_unknown_verb_is_named_and_the_nearest_suggested(capsys):
    assert cli.main(["evalute"]) == 2
    error = capsys.readouterr().err
    assert "no verb 'evalute'; did you mean 'evaluate'?" in error and "quickstart" in error


def test_flags_reach_the_verb(verb):
    assert cli.main(["probe", "--size", "3"]) == 0
    assert verb.seen[0].size == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sise", "3"], "unknown flag '--sise'; did you mean '--size'?"),
        (["--sise=3"], "unknown flag '--sise'; did you mean '--size'?"),
        (["--size", "1", "stray"], "unknown argument 'stray'"),
        (["--size", "big"], "invalid int value: 'big'"),
        (["--siz", "3"], "unknown flag '--siz'; did you mean '--size'?"),
        (["--size", "1", "-s", "3"], "unknown flag '-s'"),
        ([], "the following arguments are required: --size"),
    ],
)
def test_a_wrong_flag_is_named(verb, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["probe", *flags])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert verb.seen == []


def test_overrides_are_handed_to_verbs_that_take_them(verb):
    verb.ACCEPTS_OVERRIDES = True
    cli.main(["probe", "--learning_rate", "1e-4", "--size", "2"])
    assert verb.seen[0].overrides == ["--learning_rate", "1e-4"] and verb.seen[0].size == 2


def test_a_users_mistake_is_one_line_and_ours_a_traceback(verb, capsys, monkeypatch):
    def fail(args):
        raise MoEMBError("the disk is full; make room")

    verb.run = fail
    assert cli.main(["probe", "--size", "1"]) == 1
    assert capsys.readouterr().err == "moemb probe: error: the disk is full; make room\n"
    monkeypatch.setenv("MOEMB_TRACEBACK", "1")
    with pytest.raises(MoEMBError):
        cli.main(["probe", "--size", "1"])

    def break_down(args):
        raise ValueError("a bug")

    verb.run = break_down
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["probe", "--size", "1"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/file/new"), "/file/new: Not a directory"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/xx"), "/xx: File name too long"),
        (PermissionError(errno.EACCES, "Permission denied", "/closed/new"), "/closed/new: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", Path("/sys/new")), "/sys/new: Read-only file system"),
        (OSError(errno.EXDEV, "Invalid link", "/a", None, "/b"), "/a -> /b: Invalid link"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
        (OSError("nothing at\n  x/y"), "nothing at x/y"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_what_the_system_refuses_is_one_line_with_the_path(verb, capsys, monkeypatch, error, message):
    def refuse(args):
        raise error

    verb.run = refuse
    assert cli.main(["probe", "--size", "1"]) == 1
    assert capsys.readouterr().err == f"moemb probe: error: {message}\n"
    monkeypatch.setenv("MOEMB_TRACEBACK", "1")
    with pytest.raises(OSError):
        cli.main(["probe", "--size", "1"])


@pytest.mark.parametrize("name", ["evaluate", "data"])
@pytest.mark.parametrize(("text", "message"), [("", "is empty; add"), ("{[a]: 1}", "a key must be a name")])
def test_a_recipe_without_usable_keys_is_refused(tmp_path, capsys, name, text, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert cli.main([name, "--config", str(recipe)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(recipe) in error and error.count("\n") == 1


def test_interrupt_has_the_shells_exit_status(verb, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    verb.run = interrupt
    assert cli.main(["probe", "--size", "1"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_parses_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0 and f"moemb {name}" in capsys.readouterr().out
