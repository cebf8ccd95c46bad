"""The help of every command ends with its page of the documentation."""

import importlib
import re
import sys

import pytest

from tests.support.pages import ROOT, anchors_of

# the help of train.py has the whole configuration at its end
COMMANDS = sorted(
    path.stem for path in (ROOT / "flash_train" / "cli").glob("*.py") if path.stem not in ("__init__", "train")
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_page(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    command = importlib.import_module(f"flash_train.cli.{name}")
    try:
        command.main()
    except SystemExit as end:
        assert not end.code
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    page, _, anchor = re.fullmatch(r"Documentation: (docs/[\w#.-]+)", last)[1].partition("#")
    assert (ROOT / page).is_file()
    assert not anchor or anchor in anchors_of(ROOT / page)
