"""The command line, with one file per command. Only this package imports Hydra.

A command composes its configuration (`config`), then builds and runs one run (`run`) or many (`sweep`, `bench`).
"""
