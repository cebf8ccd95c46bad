"""The text of `flash-train --help`. Hydra's own takes twice as long: it lists the files of every group first."""

from string import Template

from omegaconf import OmegaConf

from flash_train.cli.config.compose import CONFIG_NAME, compose_config
from flash_train.cli.config.overrides import CommandLine
from flash_train.cli.config.paths import conf_dir

AUTO = "auto"
HARDWARE_LATER = "# hardware=auto is applied when the run starts and changes some of these; --cfg job shows the result."


def help_text(line: CommandLine) -> str:
    """The help in `conf/train.yaml`, with the configuration that the command line's overrides compose.

    Raises:
        UsageError: an override is wrong.
    """
    template = OmegaConf.load(conf_dir() / f"{CONFIG_NAME}.yaml").hydra.help.template
    config = compose_config(line.overrides, line.config_dir, resolve=line.resolves)
    shown = OmegaConf.to_yaml(config)
    if line.given("hardware") in (None, AUTO):  # detecting the hardware imports PyTorch, which takes seconds
        shown = f"{HARDWARE_LATER}\n{shown}"
    return Template(template).substitute(CONFIG=shown)
