"""The typed schema of the configuration: names, types and defaults. Ranges and choices are in `validate.py`.

`conf/` merges its files into these. A key that is missing here is an error with a suggestion. `null` stands for a value
that is decided when the run is built; the comment of the key, here or in `conf/train.yaml`, says how.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class AttentionSchema:
    backend: str = "auto"  # what computes attention; auto: flash if it runs here, else sdpa, else chunked
    dropout: float = 0.0  # probability that an attention weight is dropped while training


@dataclass
class RopeScalingSchema:
    """`flash_train.model.RopeScaling`; null `kind`: no scaling, or the rule of the model in `init_from`."""

    kind: str | None = None  # how rotary positions are stretched for longer rows
    factor: float | None = None  # how many times longer rows become
    original_max_position_embeddings: int | None = None  # tokens in a row of the model before
    low_freq_factor: float | None = None  # llama3: waves longer than the original row divided by this are stretched
    high_freq_factor: float | None = None  # llama3: waves shorter than the original row divided by this are kept
    beta_fast: float | None = None  # yarn: dimensions that turn more often in the original row are kept
    beta_slow: float | None = None  # yarn: dimensions that turn less often in the original row are stretched
    attention_factor: float | None = None  # yarn: factor of cosines and sines; null: follows from factor


@dataclass
class ModelSchema:
    """`flash_train.model.ModelConfig` without its attention dropout, which is `attention.dropout`.

    A field that is null takes `ModelConfig`'s default, or the value of the model in `init_from`.
    """

    name: str = MISSING  # the size's name in records
    n_layers: int | None = None  # transformer blocks
    width: int | None = None  # features of a token between blocks
    n_heads: int | None = None  # query heads
    n_kv_heads: int | None = None  # key and value heads; a divisor of n_heads
    head_dim: int | None = None  # features of a head
    mlp_width: int | None = None  # features inside the MLP
    vocab_size: int | None = None  # null: the tokenizer's, rounded up to a multiple of 64
    rope_theta: float | None = None  # base of the rotary positions
    rope_scaling: RopeScalingSchema = field(default_factory=RopeScalingSchema)
    norm_eps: float | None = None  # added to the mean square in norms
    qk_norm: bool | None = None  # norms of queries and keys
    tied_embeddings: bool | None = None  # the head uses the embedding's weight
    residual_dropout: float | None = None  # probability that an output of attention or MLP is dropped while training


@dataclass
class DataSchema:
    """`flash_train.data.PackedDataModule`: the keys of every corpus."""

    corpus: str = MISSING  # which corpus reads the documents
    tokenizer: str | None = None  # bytes, or a tokenizers JSON file; null: the one in init_from, else bytes
    bos: str | None = None  # token that begins a document, "" for none; null: the one in the tokenizer's files
    eos: str | None = None  # token that ends a document; null: the one in the tokenizer's files
    errors: str = "strict"  # what text that is not UTF-8 does: stop the run, become U+FFFD, or leave its row out
    packing: str = "best_fit"  # how documents fill rows: best_fit cuts as few as it can, concat cuts at every row's end
    val_fraction: float = 0.05  # share of the documents that are kept for validation
    val_tokens: int | None = 131072  # tokens of the validation, from the same documents at every seq_len; null: all
    val_batches: int | None = None  # a number of batches instead of val_tokens
    num_workers: int = 0  # processes that prepare rows; 0: the training process
    cache_dir: str | None = None  # folder of the token cache; null: ~/.cache/flash_train


@dataclass
class StdlibSchema(DataSchema):
    corpus: str = "stdlib"


@dataclass
class TextSchema(DataSchema):
    """`flash_train.data.TextCorpus`."""

    corpus: str = "text"
    path: Any = None  # a file, folder, glob, or a list of these
    text_field: str = "text"  # the column or key that holds a row's text


@dataclass
class HubSchema(DataSchema):
    """`flash_train.data.HubCorpus`."""

    corpus: str = "hub"
    name: str | None = None  # the dataset's name on the hub, or a local folder
    config: str | None = None  # the dataset's configuration, if it has several
    split: str = "train"  # the split to read
    text_field: str = "text"  # the column that holds a row's text
    streaming: bool = False  # true: read and tokenised in chunks while the run trains


@dataclass
class RecallSchema(DataSchema):
    """`flash_train.data.RecallCorpus`."""

    corpus: str = "recall"
    n_pairs: int = 32  # pairs in a document
    n_keys: int = 64  # keys to draw from
    n_values: int = 64  # values to draw from
    val_rows: int = 256  # rows for validation


@dataclass
class OptimizerSchema:
    """`flash_train.training.OptimizerConfig`."""

    lr: float | None = None  # null: 6e-4 · 768 / model.width
    min_lr_ratio: float = 0.1  # the cosine ends at this fraction of lr
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay of both averages
    eps: float = 1e-8  # added to the root of the averaged square
    weight_decay: float = 0.1  # of matrices; norms and embeddings have none
    warmup_steps: int | None = None  # null: a tenth of max_steps, at most 200
    gradient_clip: float | None = 1.0  # null or 0: no clipping
    master: str | None = None  # of bf16 weights; null: exact, or stochastic if only that fits
    moments: str | None = None  # null: the dtype of the weights, or 8bit if only that fits
    offload: bool = False  # true: its state is in the host's memory
    in_backward: bool | None = None  # update weights within the backward; null: if only that fits and nothing clips


@dataclass
class TrainerSchema:
    accelerator: str = "auto"  # where training runs
    devices: int = 1  # devices on each node
    num_nodes: int = 1  # machines
    strategy: str = "auto"  # ddp: the same as parallel=ddp
    checkpoint_every: int | None = None  # null: only at the end, at a stop and on SIGTERM
    keep_checkpoints: int | None = 2  # null: all
    async_checkpoints: bool = False  # true: a thread writes them while training continues
    checkpoints: bool = True  # false: saves none, so the run cannot resume
    deterministic: bool = False  # raise an error for nondeterministic operators
    cuda_graph: Any = "auto"  # replay a micro-batch's launches as one CUDA graph; auto: where it is possible and pays
    progress_bar: bool = True  # show one in the terminal


@dataclass
class ParallelSchema:
    """`flash_train.distributed.dims.ParallelDims`; null sizes follow from the number of devices and the mode."""

    mode: str = "auto"  # how several devices share the work; auto: the simplest plan that fits
    replicate: int | None = None  # groups of devices that each hold all weights
    shard: int | None = None  # devices that share the weights
    context: int | None = None  # neighbouring devices that share a row
    method: str = "auto"  # how a shared row's attention is divided; auto: the faster way
    check: bool = False  # compare one step with the same step on one device before training
    timeout: float = 30.0  # minutes until a collective that does not end stops the run


@dataclass
class MemorySchema:
    mode: str = "none"  # which activations are computed again in the backward: none, cheap ones, or whole blocks
    keep: Any = 0.0  # share of the blocks that keep everything whatever the mode; auto: the largest that fits
    offload: Any = 0.0  # share of the blocks whose inputs are in the host's memory; auto: the smallest that fits


@dataclass
class LoggerSchema:
    name: str = "none"  # where metrics go, next to the files of the run


@dataclass
class WandbSchema(LoggerSchema):
    name: str = "wandb"
    project: str | None = None  # null: WANDB_PROJECT, or flash-train
    run_name: str | None = None  # null: WANDB_NAME, or the run directory's name
    group: str | None = None  # W&B shows the runs of a group together
    mode: str = "auto"  # auto: offline if there is no login


@dataclass
class MemorySnapshotSchema:
    """`flash_train.training.callbacks.MemorySnapshot`."""

    every: int | None = None  # steps between reports of where memory goes; null: none


@dataclass
class KernelTimesSchema:
    """`flash_train.training.callbacks.KernelTimes`."""

    every: int | None = None  # steps between reports of the GPU's kernels; null: none


@dataclass
class SampleSchema:
    """`flash_train.training.ClosingSample`: a text that the trained model generates at the end of the run."""

    tokens: int = 160  # length of the text that the model writes at the end; 0: none
    seconds: float | None = 1.0  # the text ends after this time; null: no limit


@dataclass
class CallbacksSchema:
    """Optional measurements; each of them takes time."""

    sample: SampleSchema = field(default_factory=SampleSchema)
    step_times: bool = False  # split each step into forward, backward, optimizer and attention
    kernel_times: KernelTimesSchema = field(default_factory=KernelTimesSchema)
    memory_snapshot: MemorySnapshotSchema = field(default_factory=MemorySnapshotSchema)


@dataclass
class Fp8Schema:
    """The products of `precision=fp8`."""

    recipe: str = "tensorwise"  # what shares a scale: a whole operand, or with rowwise each row or column


@dataclass
class TrainSchema:
    """The whole configuration of `flash-train`."""

    seq_len: int = 16384
    max_steps: int = 200
    stop_after: int | None = None
    batch_size: int = 1
    accumulate: int | None = None
    global_batch: int | None = None
    seed: int = 0  # of weights, dropout and the order of rows
    precision: str = "fp32"  # of weights and products; mixed: fp32 weights, products in fewer bits
    precision_fp8: Fp8Schema = field(default_factory=Fp8Schema)
    run_dir: str = "runs/${now:%Y-%m-%d_%H-%M-%S}"  # folder for checkpoints, records and plots
    log_every: int = 1
    val_every: int | None = None
    resume: str | None = None
    init_from: str | None = None
    compile: bool = False
    validate_only: bool = False
    force: bool = False
    attention: AttentionSchema = field(default_factory=AttentionSchema)
    model: ModelSchema = field(default_factory=ModelSchema)
    data: DataSchema = field(default_factory=DataSchema)
    optimizer: OptimizerSchema = field(default_factory=OptimizerSchema)
    trainer: TrainerSchema = field(default_factory=TrainerSchema)
    parallel: ParallelSchema = field(default_factory=ParallelSchema)
    memory: MemorySchema = field(default_factory=MemorySchema)
    logger: LoggerSchema = field(default_factory=LoggerSchema)
    callbacks: CallbacksSchema = field(default_factory=CallbacksSchema)


@dataclass
class SweepSchema:
    """The axes of an ablation (see `flash_train.cli.sweep.plan`), and how many of its trials run at once."""

    seq_len: list[int] | None = None  # tokens in a row
    attention: list[str] | None = None  # backends
    dropout: list[float] | None = None  # probabilities of dropout in attention
    packing: list[str] | None = None  # of documents
    parallel: list[str] | None = None  # modes
    memory: list[str] | None = None  # modes
    precision: list[str] | None = None  # precisions
    model: list[str] | None = None  # sizes
    seed: list[int] | None = None  # seeds
    jobs: int = 1  # trials that run at the same time


@dataclass
class AblateSchema:
    """The configuration of `scripts/ablate.py`; `train` holds overrides of `flash-train` for every trial."""

    sweep: SweepSchema = field(default_factory=SweepSchema)
    run_dir: str = "runs/ablation_${now:%Y-%m-%d_%H-%M-%S}"
    train: list[str] = field(default_factory=list)


DATA_SCHEMAS = (StdlibSchema, TextSchema, HubSchema, RecallSchema)


@cache
def register_schema() -> None:
    """Register the schema with Hydra; the files under `conf` name it in their defaults."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainSchema)
    store.store(name="ablate_schema", node=AblateSchema)
    for node in DATA_SCHEMAS:
        store.store(group="schema/data", name=node.corpus, node=node)
    store.store(group="schema/logger", name="wandb", node=WandbSchema)
