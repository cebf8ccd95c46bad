"""Imports the scripts that are no commands."""

import importlib
import sys
from types import ModuleType
from unittest import mock

from tests.support.processes import ROOT


def load_script(name: str) -> ModuleType:
    """Import scripts/NAME.py, which finds the modules next to it."""
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        return importlib.import_module(name)
