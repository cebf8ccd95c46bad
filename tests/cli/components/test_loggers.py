"""W&B needs no account and no network, and never prompts."""

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger
from wandb.proto import wandb_internal_pb2

from flash_train.cli.components.loggers import build_logger, has_login, reachable, sync_hint, wandb_mode
from flash_train.cli.components.wandb_files import WandbFiles
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.sweep.trial import without_wandb_run

HOST = "api.wandb.ai"


def test_without_a_login_runs_are_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    assert not has_login(HOST, {})
    assert wandb_mode("auto", {}) == "offline"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_login_by_environment(name):
    assert has_login(HOST, {name: "x"})


def test_login_by_netrc(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
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


def test_a_private_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"WANDB_API_KEY": "x", "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        assert wandb_mode("auto", environ) == "online"


def test_an_explicit_mode_wins():
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
        ("auto", "", "offline", None),  # because there is no login
    ],
)
def test_a_run_at_the_server_is_resumed(wanted, variable, mode, resume, tmp_path, monkeypatch):
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


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A function that begins the W&B run of `tmp_path/run` with these overrides; there is no login."""
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)

    def call(*overrides: str):
        return build_logger(compose_config(["logger=wandb", *overrides]).logger, tmp_path / "run", {}).experiment

    return call


@pytest.fixture
def options(monkeypatch):
    """The settings that W&B derives from the arguments of each `wandb.init` and from its variables."""
    calls = []

    def init(**given):
        settings = wandb.Settings()
        settings.update_from_env_vars(os.environ)
        names = {"group": "run_group", "id": "run_id", "name": "run_name", "dir": "root_dir"}
        for key, value in given.items():
            if value is not None and key not in ("config", "settings"):
                setattr(settings, names.get(key, key), str(value))
        settings.update_from_settings(given["settings"])
        calls.append(settings)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    return calls


def log_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind W&B's seven bytes.

    The header of a record has a checksum, a length, and whether the record is whole or a part of one.
    """
    at, parts = 7, []
    while at + 7 <= len(data):
        if block - at % block < 7:  # the rest of the block is too short for a header
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(run_dir: Path, run_id: str) -> list[dict]:
    """The rows of an offline run, read as W&B's upload reads them."""
    (path,) = run_dir.glob(f"wandb/offline-run-*-{run_id}/*.wandb")
    rows = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            keys = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append(keys)
    return rows


def test_offline_parts_are_runs_of_one_group(begin, tmp_path):
    ids = []
    for part in range(3):
        run = begin("logger.mode=offline")
        assert (run.name, run.group) == ("run" if part == 0 else f"run-{part + 1}", "run")
        for step in (1, 2):
            run.log({"train/loss": 10 * part + step, "trainer/global_step": 2 * part + step})
        ids.append(run.id)
        run.finish()
    wandb.teardown()  # waits until W&B's service has written everything
    assert len(set(ids)) == 3
    assert (tmp_path / "run" / "wandb" / "run_id").read_text().split() == ids
    for part, run_id in enumerate(ids):
        rows = [row for row in history(tmp_path / "run", run_id) if "train/loss" in row]
        assert [row["trainer/global_step"] for row in rows] == [2 * part + 1, 2 * part + 2]
        assert [row["train/loss"] for row in rows] == [10 * part + 1, 10 * part + 2]


@pytest.mark.parametrize(
    ("before", "online", "same"),
    [
        ("run", True, True),  # W&B's server resumes it
        ("run", False, False),
        ("offline-run", True, False),
        ("offline-run", False, False),
        ("offline-run synced", True, True),
        ("offline-run synced", False, False),
        ("", True, True),  # nothing was logged under the id, or its files were removed
        ("", False, True),
    ],
)
def test_an_id_is_reused_only_where_no_part_would_replace_another(before, online, same, tmp_path):
    files = WandbFiles.of(tmp_path, {})
    files.remember("abcd1234")
    if before:
        folder = tmp_path / "wandb" / f"{before.split()[0]}-20260101_000000-abcd1234"
        folder.mkdir()
        (folder / f"run-abcd1234.wandb{'.synced' if 'synced' in before else ''}").touch()
    run_id, part = files.next_run(online=online)
    assert (run_id == "abcd1234", part) == (same, 1 if same else 2)


def test_variables_of_wandb_are_respected(begin, options, monkeypatch, tmp_path):
    variables = {"PROJECT": "p", "NAME": "n", "RUN_GROUP": "g", "RUN_ID": "i", "RESUME": "must", "ENTITY": "e"}
    variables |= {"DIR": str(tmp_path), "SILENT": "false", "CONSOLE": "wrap", "MODE": "online", "TAGS": "a,b"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    begin()
    (found,) = options
    assert (found.project, found.run_name, found.run_group, found.run_id) == ("p", "n", "g", "i")
    assert (found.resume, found.entity, found.root_dir, found.mode) == ("must", "e", str(tmp_path), "online")
    assert (found.silent, found.console, found.run_tags) == (False, "wrap", ("a", "b"))


def test_the_command_line_wins_over_variables_of_wandb(begin, options, monkeypatch):
    for name, value in {"PROJECT": "p", "NAME": "n", "RUN_GROUP": "g", "MODE": "online"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    begin("logger.project=q", "logger.run_name=m", "logger.group=h", "logger.mode=offline")
    (found,) = options
    assert (found.project, found.run_name, found.run_group, found.mode) == ("q", "m", "h", "offline")


def test_without_variables_names_come_from_the_run(begin, options, tmp_path):
    begin()
    (found,) = options
    assert (found.project, found.run_name, found.root_dir) == ("flash-train", "run", str(tmp_path / "run"))
    assert (found.silent, found.console) == (True, "off")


def test_the_hint_names_the_folder_given_by_wandb_dir(begin, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    ids = []
    for _ in range(2):
        run = begin("logger.mode=offline")
        ids.append(run.id)
        hint = sync_hint(WandbLogger(experiment=run), tmp_path / "run")
        run.finish()
    assert ids[0] != ids[1]
    for run_id in ids:
        assert f"{tmp_path / 'elsewhere'}/wandb/offline-run-*-{run_id}" in hint
        assert len(list((tmp_path / "elsewhere" / "wandb").glob(f"offline-run-*-{run_id}"))) == 1


def test_a_refused_run_leaves_no_file(begin, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="logger=wandb: Invalid project name 'a/b'") as raised:
        begin("logger.mode=offline", "logger.project=a/b")
    assert "no server" not in str(raised.value)  # advice that does not apply here
    assert list((tmp_path / "run").iterdir()) == []


class Refusing(BaseHTTPRequestHandler):
    """A server that rejects every key."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"errors":[{"message":"no such key"}]}')

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


def test_a_run_that_the_server_refuses_leaves_the_parts_before_as_they_were(begin, tmp_path, monkeypatch):
    run = begin("logger.mode=offline")
    run.finish()
    wandb.teardown()
    before = {path: path.is_symlink() or path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(UsageError, match="no such key.*; logger.mode=offline needs no server"):
            begin("logger.mode=online")
    finally:
        server.shutdown()
        server.server_close()
    after = {path: path.is_symlink() or path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    # W&B's links point to the newest run. That one is removed, or was never made.
    links = {tmp_path / "run" / "wandb" / name for name in ("latest-run", "debug.log", "debug-internal.log")}
    assert after.keys() - links == before.keys() - links
    assert all(path.exists() for path in links & after.keys())  # no link is broken
    assert all(after[path] == before[path] for path in after if path.suffix == ".wandb" or path.name == "run_id")


def test_trials_of_a_sweep_do_not_resume_a_wandb_run():
    environ = {"WANDB_RUN_ID": "i", "WANDB_RESUME": "must", "WANDB_ENTITY": "e", "PATH": "/bin"}
    assert without_wandb_run(environ) == {"WANDB_ENTITY": "e", "PATH": "/bin"}
