import time

from flash_train.data import notice
from flash_train.data.notice import rank_zero_only, say_if_slow


def said(capsys, monkeypatch, *, patience: float, seconds: float) -> str:
    monkeypatch.setattr(notice, "PATIENCE_SECONDS", patience)
    with say_if_slow("tokenising"):
        time.sleep(seconds)
    return capsys.readouterr().err


def test_only_slow_work_prints_a_line_and_only_one(capsys, monkeypatch):
    assert said(capsys, monkeypatch, patience=0.0, seconds=0.3) == "flash-train: data: tokenising\n"
    assert said(capsys, monkeypatch, patience=0.5, seconds=0.0) == ""
    time.sleep(0.7)
    assert capsys.readouterr().err == ""


def test_other_ranks_print_nothing(capsys, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert said(capsys, monkeypatch, patience=0.0, seconds=0.3) == ""
