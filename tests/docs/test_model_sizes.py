"""The model sizes in docs/train.md have the figures of the files in conf/model."""

import re

import pytest
import yaml

from flash_train.cli.components.model_config import VOCAB_MULTIPLE
from flash_train.data import ByteTokenizer
from flash_train.model import ModelConfig
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Model sizes")[2].partition("\n## ")[0]
BYTES = -(-ByteTokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_of(name: str) -> ModelConfig:
    """A size, with bytes as tokens where its file leaves the vocabulary open."""
    values = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return ModelConfig.from_dict({**values, "vocab_size": values["vocab_size"] or BYTES})


def rows() -> dict[str, list[str]]:
    lines = [re.split(r" *\| *", line.strip("| ")) for line in SECTION.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in lines if name != "`model=`"}


def test_every_size_has_a_row():
    files = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    assert set(rows()) == files - {"pretrained"}
    assert f"{BYTES} ids" in SECTION and f"{model_of('8b').vocab_size:,} ids" in SECTION


@pytest.mark.parametrize("name", rows())
def test_a_row_is_what_the_file_says(name):
    model = model_of(name)
    millions = model.num_parameters / 1e6
    shown = f"{millions:,.0f}" if millions >= 100 else f"{millions:.3g}"
    assert rows()[name] == [
        f"{model.n_layers}",
        f"{model.width:,}",
        f"{model.n_heads}, {model.n_kv_heads}",
        f"{model.head_dim}",
        f"{model.mlp_width:,}",
        f"{shown} M",
    ]


def test_the_share_of_the_products_in_fp8():
    model, section = model_of("8b"), PAGE.partition("### fp8")[2].partition("<!-- results")[0]
    found = []
    for tokens in (8192, 131072):
        assert f"{tokens:,} tokens" in section
        blocks = 6 * (model.matmul_parameters - model.vocab_size * model.width) * tokens
        attention = 12 * model.n_layers * model.n_heads * model.head_dim * (tokens * (tokens + 1) // 2)
        found.append(f"{blocks / (6 * model.matmul_parameters * tokens + attention):.0%}".replace("%", " %"))
    assert re.findall(r"\d+ %", section) == found
