"""Searching folders: which files are found, in which order, and what is printed about skipped ones."""

import os
from pathlib import Path

import pytest

from flash_train.data import TextCorpus


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def keys(path: Path | str) -> list[str]:
    return [document.key for document in TextCorpus(path).documents()]


def said(capsys) -> list[str]:
    lines = [line.removeprefix("flash-train: ") for line in capsys.readouterr().err.splitlines()]
    return [line for line in lines if line.startswith("data: ")]


@pytest.fixture
def deny(monkeypatch):
    """Makes folders that we may not read; skips the test for root, which may read everything."""
    denied, scandir, access = set(), os.scandir, os.access

    def scan(folder="."):
        if str(folder) in denied:
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in denied and access(path, mode))
    return lambda *paths: denied.update(map(str, paths))


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.txt"])
def test_folders_behind_links_are_read_once(tmp_path, capsys, pattern):
    root = write(tmp_path / "root", "b/one.txt", "two.txt")
    write(tmp_path / "elsewhere", "sub/three.txt")
    (root / "a").symlink_to(root / "b")  # the search also finds the target itself
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "d").symlink_to(tmp_path / "elsewhere/sub")  # already read by a path with fewer links
    (tmp_path / "elsewhere/up").symlink_to(tmp_path / "root")
    (root / "loop").symlink_to(root)
    assert keys(f"{root}{pattern}") == ["b/one.txt", "c/sub/three.txt", "two.txt"]
    assert said(capsys) == []


def test_a_link_does_not_rename_a_document(tmp_path):
    root = write(tmp_path / "root", "z/one.txt", "z.txt")
    (root / "a.txt").symlink_to(root / "z.txt")
    (root / "a").symlink_to(root / "z")
    assert keys(root) == ["z.txt", "z/one.txt"]


def test_order_of_documents_depends_on_names_only(tmp_path, monkeypatch):
    root = write(tmp_path / "root", *(f"{folder}/{name}.txt" for folder in "bca" for name in "zxy"))
    write(tmp_path / "far", "1.txt", "2.txt")
    (root / "link").symlink_to(tmp_path / "far")
    before, scandir = keys(root), os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: reversed(list(scandir(folder))))
    assert keys(root) == before == sorted(before) and len(before) == 11


@pytest.mark.parametrize("pattern", ["", "/**/*.txt"])
def test_unreadable_folders_are_listed(tmp_path, capsys, deny, pattern):
    root = write(tmp_path / "root", "a.txt", "private/b.txt", "sub/private/c.txt", "sub/secret.txt")
    deny(root / "private", root / "sub/private", root / "sub/secret.txt")
    assert keys(f"{root}{pattern}") == ["a.txt"]
    (line,) = said(capsys)
    reason = "not read: private, sub/private, sub/secret.txt (Permission denied)"
    assert line == f"data: data.path={root}{pattern}: {reason}"


def test_unreadable_path_is_an_error(tmp_path, deny):
    root = write(tmp_path / "root", "a.txt")
    deny(root)
    for path in (root, f"{root}/*.txt", f"{root}/**/*.txt"):
        with pytest.raises(ValueError, match="nothing to read there .*Permission denied"):
            TextCorpus(path)


def test_skipped_files_are_listed_in_one_line(tmp_path, capsys):
    root = write(tmp_path / "root", "a.txt", "1.png", "2.png", "3.png", "4.png", ".git/config", "sub/.hidden.txt")
    (root / "gone.txt").symlink_to(root / "nowhere.txt")
    (root / "circle.txt").symlink_to(root / "circle.txt")
    os.mkfifo(root / "pipe.txt")
    assert keys(root) == ["a.txt"]
    (line,) = said(capsys)
    assert line == (
        f"data: data.path={root}: not read: 1.png, 2.png, 3.png and 1 more (another kind of file); "
        "circle.txt, gone.txt (broken link); .git, sub/.hidden.txt (hidden); pipe.txt (not a regular file)"
    )


def test_glob_names_the_folders_that_it_does_not_search(tmp_path, capsys):
    root = write(tmp_path / "root", "a.txt", "sub/b.txt", "c.png")
    assert keys(f"{root}/*") == ["a.txt"]
    (line,) = said(capsys)
    assert line.endswith("sub (a folder, which only ** in a glob searches); c.png (another kind of file)")


def test_globs_with_folders_of_any_depth(tmp_path):
    root = write(tmp_path / "root", "a.txt", "x/b.txt", "x/y/c.txt", "x/y/d.md", "z/y/e.txt")
    assert keys(f"{root}/**/*.txt") == ["a.txt", "x/b.txt", "x/y/c.txt", "z/y/e.txt"]
    assert keys(f"{root}/**/y/*.txt") == ["x/y/c.txt", "z/y/e.txt"]
    assert keys(f"{root}/x/**/*.txt") == ["b.txt", "y/c.txt"]
    assert keys(f"{root}/[xz]/**/[cde].*") == ["x/y/c.txt", "x/y/d.md", "z/y/e.txt"]
    assert keys(f"{root}/x/**") == ["b.txt", "y/c.txt", "y/d.md"]
    write(root, ".git/f.rst")
    with pytest.raises(FileNotFoundError, match="no glob that matches any"):
        TextCorpus(f"{root}/**/*.rst")
    with pytest.raises(FileNotFoundError, match="no glob that matches any"):
        TextCorpus(f"{root}/nowhere/**/*.txt")


def test_fingerprint_follows_the_set_of_files(tmp_path):
    root = write(tmp_path / "root", "a.txt")
    write(tmp_path / "far", "b.txt")
    before = TextCorpus(root).fingerprint()
    (root / "link").symlink_to(tmp_path / "far")
    linked = TextCorpus(root).fingerprint()
    (root / "again").symlink_to(root)
    assert before != linked == TextCorpus(root).fingerprint()
