"""torchrun: the number of devices and nodes is the number of processes that it started."""

from collections.abc import Mapping

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import CommandLine


def with_started_processes(line: CommandLine, environ: Mapping[str, str]) -> CommandLine:
    """Add torchrun's numbers of devices and nodes, each process being one device.

    Raises:
        UsageError: the command line gives another number.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return line
    per_node = int(environ["LOCAL_WORLD_SIZE"])
    nodes = int(environ["WORLD_SIZE"]) // per_node
    for key, started in (("trainer.devices", per_node), ("trainer.num_nodes", nodes)):
        given = line.given(key)
        if given is None:
            line = line.with_override(key, str(started))
        elif given != str(started):
            raise UsageError(
                f"{key}={given}: torchrun started {per_node} process{'es' if per_node > 1 else ''} on each of {nodes} "
                f"node{'s' if nodes > 1 else ''}; allowed: {key}={started}, or leave it out"
            )
    return line
