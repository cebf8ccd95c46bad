"""W&B needs no account and no network, and never asks."""

import socket
from types import SimpleNamespace

import pytest
import wandb

from flash_train.cli.compose import compose_config
from flash_train.cli.loggers import build_logger, has_login, reachable, wandb_mode

HOST = "api.wandb.ai"


def test_no_login(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    assert not has_login(HOST, {})
    assert wandb_mode("auto", {}) == "offline"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_login_by_environment(name):
    assert has_login(HOST, {name: "x"})


def test_login_by_netrc(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    (tmp_path / ".netrc").write_text(f"machine {HOST}\n  login user\n  password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_login(HOST, {})
    assert not has_login("elsewhere.example", {})
    assert not has_login(HOST, {"NETRC": str(tmp_path / "none")})


def test_a_broken_netrc_is_no_login(tmp_path):
    (tmp_path / "netrc").write_text("machine")
    assert not has_login(HOST, {"NETRC": str(tmp_path / "netrc")})


def test_a_login_without_a_connection_is_offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    environ = {"WANDB_API_KEY": "x"}
    assert not reachable(HOST, 443, environ)
    assert wandb_mode("auto", environ) == "offline"
    assert wandb_mode("auto", {**environ, "HTTPS_PROXY": "proxy:1"}) == "online"


def test_a_server_of_ones_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"WANDB_API_KEY": "x", "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        assert wandb_mode("auto", environ) == "online"


def test_what_was_asked_for_is_done():
    assert wandb_mode("online", {}) == "online"
    assert wandb_mode("offline", {"WANDB_API_KEY": "x"}) == "offline"
    assert wandb_mode("auto", {"WANDB_MODE": "disabled"}) is None


@pytest.mark.parametrize(
    ("wanted", "variable", "mode", "resume"),
    [
        ("online", "", "online", "allow"),
        ("auto", "online", None, "allow"),
        ("auto", "shared", None, "allow"),
        ("offline", "online", "offline", None),
        ("auto", "offline", None, None),
        ("auto", "disabled", None, None),
        ("auto", "", "offline", None),  # as there is no login
    ],
)
def test_a_run_at_the_server_goes_on(wanted, variable, mode, resume, tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setenv("WANDB_MODE", variable)
    calls = []
    monkeypatch.setattr(
        wandb, "init", lambda **options: calls.append(options) or SimpleNamespace(define_metric=lambda *_, **__: None)
    )
    settings = compose_config(["logger=wandb", f"logger.mode={wanted}"]).logger
    for _ in range(2):
        build_logger(settings, tmp_path / "run", {})
    assert [(call["mode"], call["resume"]) for call in calls] == [(mode, resume)] * 2
    assert calls[0]["id"] == calls[1]["id"] == (tmp_path / "run" / "wandb" / "run_id").read_text().strip()
