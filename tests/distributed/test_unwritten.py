"""Rank 1 of two cannot write its part of a checkpoint: one message, or one traceback.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.test_unwritten OSError FOLDER --devices 2 ...
"""

import os
import sys
import traceback

import pytest

from flash_train.distributed import checkpoint
from tests.support.distributed import resumable_run
from tests.support.processes import start_ranks

ERRORS = {"OSError": OSError(28, "No space left on device"), "KeyError": KeyError("a mistake")}


def run(tmp_path, error, *options):
    """Return the exit codes, and what both ranks printed to standard error."""
    sharded = ("--devices", 2, "--strategy", "sharded", "--steps", 4)
    processes = start_ranks("tests.distributed.test_unwritten", 2, error, tmp_path, *sharded, *options)
    try:
        errors = [process.communicate(60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize("options", [(), ("--write-later",)], ids=["now", "in the background"])
def test_one_line_says_that_a_checkpoint_was_not_written(tmp_path, options):
    codes, errors = run(tmp_path, "OSError", *options)
    said = [[line for line in error.splitlines() if "not written" in line] for error in errors]
    lines = [
        f"flash-train: {tmp_path}/checkpoints/step-00000{step}.ckpt not written (rank 1: No space left on device); "
        "the run continues"
        for step in (2, 4)
    ]
    assert codes == [0, 0] and said == [lines, []], errors


def test_another_error_has_one_traceback(tmp_path):
    codes, errors = run(tmp_path, "KeyError")
    text = "".join(errors)
    assert codes == [1, 1] and text.count("Traceback (most recent call last)") == 1, text
    assert "KeyError: 'a mistake'" in text and "CheckpointException" not in text
    assert "Rank 1 raised this while it wrote its part of a checkpoint" in text


def main():
    error = ERRORS[sys.argv.pop(1)]
    plain = checkpoint.FileSystemWriter.write_data

    def write_data(self, *arguments):
        if os.environ["RANK"] == "1":
            raise error
        return plain(self, *arguments)

    checkpoint.FileSystemWriter.write_data = write_data
    try:
        resumable_run.main()
    except BaseException:
        traceback.print_exc()  # the process ends before Python does it
        raise


if __name__ == "__main__":
    main()
