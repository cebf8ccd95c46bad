"""The components of a run, each built from its part of the configuration: data, model, module, trainer, loggers."""
