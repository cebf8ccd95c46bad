"""Mutated command lines: typos, wrong types and quoting mistakes in lines that were right.

`mutated_lines` draws them from a seed.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flash_train.cli.config.choices import choices_of, dotted_names, groups
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.schema import HubSchema, RecallSchema, TextSchema, WandbSchema
from flash_train.cli.config.validate import RULES

COMMANDS = ("train", "train -m", "profile_memory", "find_max", "ablate", "export", "tune_attention", "bench_attention")
COMMANDS += ("bench_memory", "bench_training", "bench_start", "collect_runs", "bench_parallel")
WEIGHTS = (40, 20, 8, 8, 12, 4, 2, 1, 2, 1, 1, 1, 1)

VALUES = [
    *("null", "''", "", "abc", "true", "0", "-1", "1.5", "-0.0", "1e308", "-1e308", "nan", "inf", "-inf", "1e-320"),
    *(str(10**30), str(-(10**30)), str(2**63), str(2**31), str(10**9), str(10**12), "9" * 400, "1e400", "1_000"),
    *("0x10", "007"),
    *("[]", "[1,2]", "[[1],[2]]", "[[[]]]", "[null]", "[a,b]", "{}", "{a:1}", "{a:{b:[1]}}", "[{a:1}]"),
    *("{seq_len:1}", "'a b'", "a b", "a=b", "a:b", "ünïcødé", "日本語", "😀", "١٢"),
    *("~", "~/x", ".", "..", "/", "/dev/null"),
    *("???", "${seed}", "${nope}", "${oc.env:NOPE_X}", "${model}", "${", "$", "\\", '"', "'"),
    *("[", "]", "{", "}", "(", ","),
    *("1,2", "a,b", "null,null", "1,", "range(0)", "range(2)", "range(3,1)", "choice()", "choice(1,2)", "choice(a)"),
    *("glob(*)", "glob(zzz*)", "shuffle(1,2)", "sort(2,1)", "interval(0,1)"),
    *("int(1)", "int(a)", "float(x)", "tag(a,1)"),
    *("a\nb", " ", "%s", "{}}", "--", "a" * 3000, "nano", "bytes", "last", "cpu", "text", "none", "auto"),
]
NUMBERS = ["nan", "inf", "-inf", "0", "-1", "-0.0", "1e-320", "1e308", "-1e308", "1", "2", "3", "7", "1.5", "0.5"]
NUMBERS += ["100000", str(2**31 - 1), str(2**31), str(2**32), str(2**53), str(2**63 - 1), str(2**63), str(10**30)]
FLAGS: list[list[str]] = [
    *(["--cfg", kind] for kind in ("job", "hydra", "all", "nope")),
    *(["-c", "job"], ["--resolve"], ["--cfg", "job", "--resolve"], ["--package", "model"], ["-p", "nope"], ["--run"]),
    *(["--cfg", "job", "-p", "model"], ["--cfg", "job", "-p", "nope"], ["--cfg"], ["--cfg=job"], ["--info"]),
    *(["--info", kind] for kind in ("all", "config", "defaults", "plugins", "searchpath", "nope")),
    *(["-cn", "nope"], ["-cn", "ablate"], ["--config-name", "train"], ["-cp", "nope"], ["--config-path", "/"]),
    *(["--config-dir", "nope"], ["-cd", "/dev/null"], ["--config-dir", "/"], ["-m"], ["--multirun"], ["-r"]),
    *(["--experimental-rerun", "x"], ["--hydra-help"], ["--help"], ["-h"], ["--version"], ["-sc"], ["-sc", "a=b"]),
    *(["--nope"], ["-x"], ["-"], ["--"], [""], [" "], ["=x"], ["="], ["--seq_len=3"], ["-m", "-m"], ["ünï"]),
    *(["hydra.mode=MULTIRUN"], ["hydra.job.chdir=true"], ["hydra/launcher=joblib"], ["hydra.sweeper.params=x"]),
    *(["hydra.run.dir=x"], ["hydra.sweep.dir=x"], ["hydra/job_logging=default"], ["hydra.verbose=true"], ["hydra=x"]),
    *(["hydra.sweeper.params={seed: '0,1'}"], ["hydra.searchpath=[x]"], ["hydra.nope=1"], ["~hydra"], ["+hydra.x=1"]),
    *(["hydra.output_subdir=x"], ["hydra.help.template=x"], ["hydra.job.num=7"], ["hydra/sweeper=nope"]),
]


@dataclass(frozen=True)
class Line:
    """A command line, and the keys and flags that were mutated."""

    command: str
    arguments: tuple[str, ...]
    mutated: tuple[str, ...]


def every_key() -> list[str]:
    """Dotted names of all values and groups that a training run has."""
    config = compose_config(["hardware=cpu"])
    keys = set(dotted_names(dict(_plain(config)))) | set(groups())
    for group, schemas in (("data", (TextSchema, HubSchema, RecallSchema)), ("logger", (WandbSchema,))):
        keys |= {f"{group}.{name}" for schema in schemas for name in schema.__dataclass_fields__}
    return sorted(keys)


def _plain(config) -> dict:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config)


def mutated_lines(count: int, seed: int, base: Sequence[str], checkpoint: str, folder: str) -> Iterator[Line]:
    """Draw command lines.

    Args:
        base: overrides of a valid training run.
        checkpoint: a run's checkpoint, for the commands that read one.
        folder: where a command may write.
    """
    draw = random.Random(seed)
    keys = every_key()
    for _ in range(count):
        command = draw.choices(COMMANDS, WEIGHTS)[0]
        own, known = {
            "train": ([], keys),
            "train -m": (["-m", "seed=0,1"], keys),
            "profile_memory": ([], keys),
            "find_max": (["find_max=true"], [*keys, *(f"find_max.{x}" for x in ("limit", "memory", "attention"))]),
            "ablate": (["sweep.seq_len=[64,128]"], [*keys, *(f"sweep.{x}" for x in SWEEP), "sweep", "train"]),
        }.get(command, ([], []))
        if not known:
            yield _with_mutated_options(draw, command, checkpoint, folder)
            continue
        arguments = [*base, *own]
        if command == "find_max":
            arguments = [text for text in arguments if not text.startswith("seq_len=")]
        if command == "ablate":
            arguments = [text for text in arguments if not text.startswith("seq_len=")]
        mutated: list[str] = []
        for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
            mutated += _mutate(draw, arguments, known)
        yield Line(command, tuple(arguments), tuple(mutated))


SWEEP = ("seq_len", "attention", "dropout", "packing", "memory", "precision", "model", "jobs")


def _mutate(draw: random.Random, arguments: list[str], keys: Sequence[str]) -> list[str]:
    """Change the arguments in place; returns the keys or flags that were changed."""
    key, value = draw.choice(keys), draw.choice(VALUES)
    if draw.random() < 0.5:
        value = _plausible(draw, key)
    kind = draw.choice(("value",) * 8 + ("typo", "typo", "prefix", "twice", "flag", "flag", "flag", "nested", "bare"))
    if kind == "value":
        added = [f"{key}={value}"]
    elif kind == "typo":
        key = _typo(draw, key)
        added = [f"{key}={value}"]
    elif kind == "prefix":
        sign = draw.choice(("+", "++", "~", "+~", "@", "/"))
        added = [f"{sign}{key}" + draw.choice(("", f"={value}"))]
    elif kind == "twice":
        added = [f"{key}={value}", f"{key}={draw.choice(VALUES)}"]
    elif kind == "nested":
        key = f"{key}.{draw.choice(('x', 'name', '0', '', 'a.b'))}"
        added = [f"{key}={value}"]
    elif kind == "bare":
        added = [draw.choice((key, f"{key}:{value}", f"{key} = {value}", f"{key}@x={value}", f"={key}"))]
    else:
        flag = draw.choice(FLAGS)
        place = draw.choice((0, len(arguments)))
        arguments[place:place] = flag
        return list(flag)
    arguments += added
    return [key]


def _plausible(draw: random.Random, key: str) -> str:
    """A value of the right type, in range or not."""
    if key in groups():
        return draw.choice(choices_of(key))
    if key in RULES and RULES[key].choices:
        return draw.choice(RULES[key].choices)
    return draw.choice(("true", "false", *NUMBERS))


def _typo(draw: random.Random, key: str) -> str:
    place = draw.randrange(len(key))
    return draw.choice(
        (
            key[:place] + key[place + 1 :],
            key[:place] + key[place] + key[place:],
            key[:place] + draw.choice("xé_.") + key[place + 1 :],
            key.rpartition(".")[2] if "." in key else key.upper(),
            key.replace("_", "-"),
        )
    )


OPTIONS = {
    "export": ("--dtype", "--force"),
    "tune_attention": ("--variant", "--kernel", "--apart", "--dtype", "--seq-len", "--rep", "--workers", "--table"),
    "bench_attention": ("--out", "--only", "--commit", "--time-limit", "--rep", "--implementations"),
    "bench_memory": ("--out", "--only", "--kinds", "--models", "--lengths", "--memory", "--attention"),
    "bench_training": ("--out", "--only", "--commit", "--time-limit"),
    "bench_start": ("--out", "--only", "--commit", "--time-limit", "--rounds"),
    "bench_parallel": ("--out", "--only", "--commit", "--time-limit"),
    "collect_runs": ("--out", "--add", "--commit"),
}


def _with_mutated_options(draw: random.Random, command: str, checkpoint: str, folder: str) -> Line:
    """A command whose options are read by argparse."""
    positional = {
        "export": [checkpoint, f"{folder}/exported"],
        "tune_attention": ["64"],
        "bench_parallel": ["attention"],
        "collect_runs": [checkpoint, "--out", f"{folder}/records.json"],
    }.get(command, [])
    arguments, mutated = list(positional), list(positional)  # an error may name these, as there is no finished run
    for _ in range(draw.choice((1, 1, 2))):
        option, value = draw.choice(OPTIONS[command]), draw.choice(VALUES)
        kind = draw.choice(("value", "value", "typo", "none", "positional", "drop"))
        if kind == "value":
            added = [option, value] if draw.random() < 0.5 else [f"{option}={value}"]
        elif kind == "typo":
            added = [_typo(draw, option.removeprefix("--")), value]
            added[0] = f"--{added[0]}"
        elif kind == "none":
            added = [option]
        elif kind == "positional":
            added = [value]
        else:
            mutated += ["folder", "head_dims", "RUN_DIR", "checkpoint", "what", *arguments[:1]]
            arguments, added = arguments[1:], []
        arguments += added
        mutated += added
    return Line(command, tuple(arguments), tuple(mutated))
