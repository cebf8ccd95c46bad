"""Output that fails must not fail the process."""

import io
import logging
import os
import subprocess
import sys

import pytest

from flash_train.output import PREFIX, STDERR, LastingStream, lasting_output, say, say_in_handler


@pytest.fixture
def broken_pipe():
    """A text stream into a pipe without a reader."""
    ours, theirs = os.pipe()
    os.close(ours)
    with io.FileIO(theirs, "w") as raw:
        yield io.TextIOWrapper(raw, encoding="utf-8", write_through=True)


def test_a_closed_pipe_raises_nothing(broken_pipe, monkeypatch):
    with pytest.raises(BrokenPipeError):
        print("a line", file=broken_pipe, flush=True)
    monkeypatch.setattr(sys, "stderr", broken_pipe)
    print("a line", file=LastingStream(lambda: broken_pipe), flush=True)
    say("a line")
    say_in_handler("a line")
    assert STDERR.write("four") == 4 and not STDERR.isatty()


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_stream_that_is_missing_or_closed_raises_nothing(stream, monkeypatch):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    say("a line")
    say_in_handler("a line")
    assert not STDERR.isatty()
    with lasting_output():
        print("a line", file=sys.stderr, flush=True)


def test_characters_that_the_encoding_lacks_are_escaped():
    raw = io.BytesIO()
    with pytest.raises(UnicodeEncodeError):
        print("…", file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    ascii_, utf8 = (io.TextIOWrapper(raw, encoding=name, write_through=True) for name in ("ascii", "utf-8"))
    print("caf\xe9 …", file=LastingStream(lambda: ascii_))
    print("caf\xe9 …", file=LastingStream(lambda: utf8))
    print("a name on the disk that is no text: \udcff", file=LastingStream(lambda: utf8))
    assert raw.getvalue().decode().splitlines() == [
        "caf\\xe9 \\u2026",
        "caf\xe9 …",
        "a name on the disk that is no text: \\udcff",
    ]


def test_working_stream_is_used_unchanged(capsys):
    with lasting_output():
        print("out")
        print("err", file=sys.stderr)
    say("said")
    assert capsys.readouterr() == ("out\n", "err\nflash-train: said\n")


LOGS = """
import logging, sys
from flash_train.output import LOGGER, say, show_messages
exec(sys.argv[1])
say("a note")
LOGGER.warning("a warning")
"""


@pytest.mark.parametrize(
    ("setup", "lines"),
    [
        ("", [f"{PREFIX}a note", f"{PREFIX}a warning"]),
        ("logging.basicConfig(format='mine: %(message)s')", ["mine: a note", "mine: a warning"]),
        ("LOGGER.setLevel(logging.WARNING)", ["flash-train: a warning"]),
        ("LOGGER.addHandler(logging.NullHandler())", []),
        (
            "logging.basicConfig(filename='/dev/null'); show_messages()",
            [f"{PREFIX}a note", f"{PREFIX}a warning"],
        ),
    ],
    ids=["nothing set up", "the root logger", "a level", "a handler", "a command"],
)
def test_messages_follow_the_programs_logging_setup(setup, lines):
    done = subprocess.run([sys.executable, "-c", LOGS, setup], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.splitlines()) == ("", lines)


def test_messages_are_records_of_the_packages_logger(caplog):
    with caplog.at_level(logging.INFO, logger="flash_train"):
        say("100 % of it")
    assert caplog.record_tuples == [("flash_train", logging.INFO, "100 % of it")]


PRINTS = """
import sys
from flash_train.output import lasting_output
print("buffered before")
with lasting_output():
    for i in range(5):
        print("x" * 5000)
        print("y", file=sys.stderr, flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("redirection", ["| true", ">&-", "2>&-", ">&- 2>&-", "> /dev/full 2>&1"])
def test_a_process_without_its_output_ends_with_its_own_status(redirection):
    """Python's exit status is 120 where standard output cannot be flushed."""
    command = f'set -o pipefail; "$0" -c "$1" {redirection}; exit ${{PIPESTATUS[0]}}'
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    arguments = ["bash", "-c", command, sys.executable, PRINTS]
    done = subprocess.run(arguments, env=environ, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 7, done.stderr
    assert "Error" not in done.stderr
