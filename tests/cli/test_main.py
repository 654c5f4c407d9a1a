"""What all commands share: help with examples, exit statuses, and colour only on terminals."""

import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress

import pytest

from qcomp.cli import main
from qcomp.cli.main import _COMMANDS, make_parser
from qcomp.cli.output import Style, style_for, table

EXAMPLES = [
    command.partition(" > ")[0].strip()
    for module, _ in _COMMANDS.values()
    for line in module.EPILOG.splitlines()
    if " qcomp " in f" {line.strip()} " and line.startswith("  ")
    for command in line.split(" && ")
]


def printed_help(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--help"])
    assert leaving.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_help_has_examples(capsys, command):
    text = printed_help(capsys, command)
    assert "\nexamples:\n" in text
    assert f"qcomp {command}" in text.partition("\nexamples:\n")[2]
    assert max(map(len, text.splitlines())) <= 120


def test_the_help_lists_all_commands(capsys):
    text = printed_help(capsys)
    for command, (_, summary) in _COMMANDS.items():
        assert command in text
        assert summary.split()[0] in text
    assert "status: 0 if all is well, 1 if a problem was found, 2 if the command was called wrongly" in text


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_can_be_parsed(line):
    words = shlex.split(line)
    options = make_parser().parse_args(words[words.index("qcomp") + 1 :])
    assert options.command in _COMMANDS


def test_every_command_has_examples():
    assert len(EXAMPLES) >= 3 * len(_COMMANDS)


@pytest.mark.parametrize("arguments", [["--nothing"], ["info", "--nothing"], ["fly"], ["bench", "extra"]])
def test_wrong_usage_ends_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: qcomp" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_only_for_terminals_that_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert style_for(Terminal()).coloured
    assert not style_for(io.StringIO()).coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert not style_for(Terminal()).coloured
    monkeypatch.setenv("NO_COLOR", "")  # the convention treats an empty value as not set
    assert style_for(Terminal()).coloured
    monkeypatch.setenv("TERM", "dumb")
    assert not style_for(Terminal()).coloured


def test_colours():
    assert Style(True).good("ok") == "\x1b[32mok\x1b[0m"
    assert Style(False).bad("broken") == "broken"


def test_tables_are_aligned():
    assert list(table([["a", "bb", "c"], ["aaa", "b", ""]])) == ["a    bb  c", "aaa  b"]
    assert list(table([["a", "bb"], ["aaa", "b"]], right=True)) == ["a    bb", "aaa   b"]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "openpty"), reason="colour is checked on a terminal, which this system has not"
)
@pytest.mark.parametrize("no_color", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_a_terminal(no_color):
    ours, theirs = os.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    if no_color:
        environment["NO_COLOR"] = "1"
    command = [sys.executable, "-m", "qcomp", "check", "identity", "--law", "lossless"]
    done = subprocess.run(command, stdout=theirs, env=environment, timeout=60, check=False)
    os.close(theirs)
    found = b""
    with suppress(OSError):  # Linux reports the closed terminal with an OSError once everything has been read
        while part := os.read(ours, 1000):
            found += part
    os.close(ours)
    assert done.returncode == 0
    assert (b"\x1b[32mok\x1b[0m" in found) is not no_color
    assert b"lossless" in found


def test_json_goes_before_or_after_other_options(capsys):
    assert main(["bench", "--json", "--compressor", "sign", "--elements", "100", "--rounds", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["elements"] == 100


def test_an_interrupt_prints_no_traceback(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(_COMMANDS["info"][0], "run", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
def test_a_closed_pipe_prints_no_traceback():
    code = f"{shlex.quote(sys.executable)} -m qcomp bench --compressor sign --elements 100 --rounds 1 | true"
    done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


@pytest.mark.slow
def test_a_full_disk_is_a_usage_error_without_a_traceback(tmp_path):
    command = f'ulimit -f 0; exec "{sys.executable}" -m qcomp info > "{tmp_path}/full"'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "the output cannot be written: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_no_error():
    command = f'"{sys.executable}" -m qcomp plan --params 1M --compute-ms 1 --ranks 2 --link 1gbit >&-'
    assert subprocess.run(command, shell=True, check=False, timeout=60).returncode == 0
