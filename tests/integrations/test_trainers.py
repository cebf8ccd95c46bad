"""Trainers of transformers and TRL, and PEFT's adapters, compute the same with this attention as with `eager`.

The reference trains on the same batches with `eager` attention, each document by itself, in fp64. An error may be twice
(weights and gradients: three times) the error of `eager` in the same precision, plus the rounding of the result.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from flash_train.integrations.transformers import register
from tests.support.redrawn import assert_within

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

VOCAB = 61
LEARNING_RATE = 0.1
#: the same in every run: the reference repeats the steps with plain SGD
ARGUMENTS = {
    "use_cpu": True, "per_device_train_batch_size": 3, "max_steps": 4, "optim": "sgd", "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0, "report_to": [], "save_strategy": "no",
    "disable_tqdm": True, "bf16": False,
}  # fmt: skip
#: the gradient is taken with checkpoints, or without
CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def model_of(seed, dtype=torch.float32):
    """A small Llama with this project's attention."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,  # large, so that attention is not nearly uniform
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register()).to(dtype)


def with_eager(model, dtype):
    """A copy that computes with `eager` in another precision."""
    found = copy.deepcopy(model).to(dtype)
    found.set_attn_implementation("eager")
    return found


def documents_of(seed, count=24):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(3, VOCAB, (length,), generator=draw).tolist()} for length in lengths]


def recorded(base):
    """A trainer that keeps the batches and the losses of its steps."""

    class Recorded(base):
        def compute_loss(self, model, inputs, *args, **options):
            kept = {name: inputs[name].clone() for name in ("input_ids", "labels", "position_ids")}
            loss = super().compute_loss(model, inputs, *args, **options)
            self.steps = [*getattr(self, "steps", []), (kept, float(loss.detach()))]
            return loss

    return Recorded


def loss_by_documents(model, batch):
    """The mean loss of the tokens of a batch of packed rows, each document computed by itself."""
    total, count = 0.0, 0
    for tokens, labels, positions in zip(*(batch[k] for k in ("input_ids", "labels", "position_ids")), strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        lengths = torch.tensor([*starts, len(tokens)]).diff().tolist()
        for document, target in zip(tokens.split(lengths), labels.split(lengths), strict=True):
            logits = model(document[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, target[1:], ignore_index=-100, reduction="sum")
            count += int((target[1:] != -100).sum())
    return total / count


def trained_by_documents(model, steps):
    """Repeat a trainer's steps with SGD: the losses in one tensor, and each parameter that was trained."""
    losses = []
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch, _ in steps:
        loss = loss_by_documents(model, batch)
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in trained)]


def check(trainer, before):
    """Train, and compare the losses and the trained weights with the reference."""
    trainer.train()
    assert len(trainer.steps) == ARGUMENTS["max_steps"]
    weights = [p.detach() for p in trainer.accelerator.unwrap_model(trainer.model).parameters() if p.requires_grad]
    assert len(weights) >= 8
    losses = torch.tensor([loss for _, loss in trainer.steps])
    assert_within(
        [losses, *weights], before, lambda model, dtype: trained_by_documents(with_eager(model, dtype), trainer.steps),
        torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("boundaries", [False, True], ids=["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("options", [{}, CHECKPOINTS], ids=["plain", "checkpoints"])
def test_trainer_with_flattened_batches(boundaries, options, tmp_path):
    model = model_of(boundaries)
    trainer = recorded(transformers.Trainer)(
        copy.deepcopy(model),
        transformers.TrainingArguments(str(tmp_path), **ARGUMENTS, **options),
        data_collator=transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=boundaries),
        train_dataset=documents_of(len(options)),
    )
    check(trainer, model)


def tokenizer():
    """A token for each number: TRL wants a tokenizer, though the documents have been tokenised."""
    from tokenizers import Tokenizer, models

    words = {f"t{number}": number for number in range(VOCAB)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t1")), pad_token="t0", eos_token="t2"
    )


def lora(model=None):
    """LoRA's configuration; with a model, adapters in it that already change its output."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    return config if model is None else peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        ({"packing": True, "max_length": 32}, False),
        ({"padding_free": True, "max_length": None}, False),
        ({"packing": True, "max_length": 32, **CHECKPOINTS}, True),
    ],
    ids=["packing", "padding_free", "lora"],
)
def test_sft_trainer(options, adapters, tmp_path):
    """TRL packs and concatenates documents. Older releases warn that they do not know the name of the attention."""
    model = lora(model_of(3)) if adapters else model_of(3)
    trainer = recorded(trl.SFTTrainer)(
        copy.deepcopy(model),
        trl.SFTConfig(str(tmp_path), **ARGUMENTS, **options),
        train_dataset=datasets.Dataset.from_list(documents_of(4, count=48)),
        processing_class=tokenizer(),
    )
    check(trainer, model)
    rows = [batch["position_ids"] for batch, _ in trainer.steps]
    assert all((row == 0).sum() > len(row) for row in rows)  # several documents in each row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora_on_packed_rows(dtype):
    """Output, gradients of the adapters, and the output of the merged weights."""
    model = lora(model_of(5, dtype)).eval()
    draw = torch.Generator().manual_seed(6)
    tokens, lengths = torch.randint(3, VOCAB, (1, 24), generator=draw), (3, 14, 7)
    weights = torch.randn(24, VOCAB, generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def run(model, by_documents=True):
        if by_documents:
            logits = torch.cat([model(part, use_cache=False).logits[0] for part in tokens.split(lengths, 1)])
        else:
            logits = model(tokens, position_ids=positions, use_cache=False).logits[0]
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad((logits * weights.to(logits.dtype)).sum(), trained) if trained else ()
        return [logits.detach(), *gradients]

    def eager(model, dtype):
        found = with_eager(model, dtype)
        for p, q in zip(found.parameters(), model.parameters(), strict=True):
            # PEFT keeps adapters of 16-bit models in fp32
            p.data = p.data.to(torch.promote_types(dtype, q.dtype))
        return found

    def merged(model):
        return copy.deepcopy(model).merge_and_unload().requires_grad_(False)

    found = run(model, by_documents=False)
    assert len(found) == 1 + 12
    assert_within(found, model, lambda *given: run(eager(*given)), dtype)
    assert_within(run(merged(model), by_documents=False), model, lambda *given: run(merged(eager(*given))), dtype)
