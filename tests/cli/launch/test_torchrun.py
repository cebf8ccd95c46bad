"""Under torchrun, devices and nodes are its processes."""

import pytest

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import read
from flash_train.cli.launch.torchrun import with_started_processes

STARTED = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6"}


@pytest.mark.parametrize("given", [[], ["trainer.devices=2"], ["trainer.num_nodes=3", "trainer.devices=2"]])
def test_the_processes_are_the_devices(given):
    line = with_started_processes(read(["seed=3", *given]), STARTED)
    assert (line.given("trainer.devices"), line.given("trainer.num_nodes"), line.given("seed")) == ("2", "3", "3")


@pytest.mark.parametrize(
    ("given", "allowed"), [("trainer.devices=4", "trainer.devices=2"), ("trainer.num_nodes=1", "trainer.num_nodes=3")]
)
def test_another_number_is_refused(given, allowed):
    with pytest.raises(UsageError) as error:
        with_started_processes(read([given]), STARTED)
    assert str(error.value) == (
        f"{given}: torchrun started 2 processes on each of 3 nodes; allowed: {allowed}, or leave it out"
    )


def test_without_torchrun_nothing_is_added():
    line = read(["seed=3"])
    assert with_started_processes(line, {"WORLD_SIZE": "6"}) == line
