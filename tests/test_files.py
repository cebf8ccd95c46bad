"""Files that are replaced whole or not at all."""

import os

import pytest

from flash_train.files import remove_temporary, replacing, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "x.txt"
    with replacing(path) as temporary:
        temporary.write_text("one")
        assert not path.exists() and temporary.parent == path.parent
    with pytest.raises(ValueError, match="half"), replacing(path) as temporary:
        temporary.write_text("tw")
        raise ValueError("half")
    assert path.read_text() == "one" and [file.name for file in path.parent.iterdir()] == ["x.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_devices_and_pipes_are_not_replaced(tmp_path):
    """In a container the user is often root, who can replace /dev/null by a file."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="a device or a pipe, and must be a file or new"):
        write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_two_writers_of_one_file_use_different_temporary_files(tmp_path):
    """In one process here; processes on different machines may have the same id."""
    path = tmp_path / "x.txt"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # `first` ended last
    assert [file.name for file in tmp_path.iterdir()] == ["x.txt"]


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "x.txt") as temporary:
        temporary.write_text("half")
        left = temporary.with_name(temporary.name)
        os.rename(temporary, tmp_path / "moved")
    (tmp_path / "moved").rename(left)
    (tmp_path / ".other.txt.1-ab.tmp").touch()
    remove_temporary(tmp_path, ["x.txt"])
    assert [file.name for file in tmp_path.iterdir()] == [".other.txt.1-ab.tmp"]
