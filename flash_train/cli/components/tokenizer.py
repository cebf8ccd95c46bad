"""The tokenizer of a run: the one that `data.tokenizer` names, the one in `init_from`, or bytes."""

from pathlib import Path

from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError, blame
from flash_train.data import ByteTokenizer, JsonTokenizer, Tokenizer
from flash_train.data.special_tokens import TOKENIZER
from flash_train.model import pretrained_values

#: this key of config.json is "bytes" in the export of a model that reads bytes: such an export has no tokenizer.json
MARK = "flash_train_tokenizer"
#: other tokenizer files that a model's folder may have; they are not read
OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "tokenizer_config.json")


def build_tokenizer(config: DictConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; by default the one in `init_from`, or bytes for a new model.

    Raises:
        UsageError: the model in `init_from` has no tokenizer.json, so its tokens are unknown.
    """
    name = config.data.tokenizer
    if name is None and config.init_from and config.data.corpus != "recall":  # recall generates tokens, not text
        name = _tokenizer_of(config.init_from)
    if name in (None, "bytes"):
        for key in ("eos", "bos"):
            if config.data[key] is not None:
                raise UsageError(
                    f"data.{key}={config.data[key]}: bytes have their own begin and end tokens; "
                    f"allowed: data.tokenizer=FILE with it, or no data.{key}"
                )
        return ByteTokenizer()
    with blame(f"data.tokenizer={name}"):
        return JsonTokenizer(
            name,
            errors=config.data.errors,
            bos=config.data.bos,
            eos=config.data.eos,
            embeddings=pretrained_values(config.init_from).get("vocab_size") if config.init_from else None,
        )


def describe_tokens(tokenizer: Tokenizer) -> str | None:
    """How documents begin and end, and which file says so; None for bytes."""
    return tokenizer.special_tokens.description if isinstance(tokenizer, JsonTokenizer) else None


def _tokenizer_of(folder: str) -> str:
    file = Path(folder).expanduser() / TOKENIZER
    if file.is_file():
        return str(file)
    with blame(f"init_from={folder}"):
        if pretrained_values(folder).get(MARK) == "bytes":
            return "bytes"
    there = [name for name in OTHER_FORMS if file.with_name(name).is_file()]
    instead = f" (only {', '.join(there)}, which cannot be read)" if there else ""
    raise UsageError(
        f"init_from={folder}: has no {TOKENIZER}{instead}; allowed: data.tokenizer=FILE, a {TOKENIZER} with the tokens "
        "that the model was trained on, or data.tokenizer=bytes for a model of bytes"
    )
