"""Models of Hugging Face, tiny, through `dc.parallelize` on 4 simulated ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distcell as dc

transformers = pytest.importorskip("transformers", reason="needs the extra [huggingface]")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:distcell sets:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

VOCAB, BATCH, LENGTH = 64, 4, 8


def _text() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2
    )
    return transformers.GPT2LMHeadModel(config), _text()


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config), _text()


def _bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config), _text()


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), _text()


def _vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=4,
    )
    labels = torch.arange(BATCH) % 4
    pixels = torch.randn(BATCH, 3, 8, 8)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": labels,
    }


def _mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
        experts_implementation="batched_mm",
    )
    return transformers.MixtralForCausalLM(config), _text()


MODELS = [
    _gpt2,
    _llama,
    _vit,
    *(pytest.param(make, marks=pytest.mark.full) for make in (_bert, _t5, _mixtral)),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__.strip("_"))
def test_five_steps_on_four_ranks_are_those_of_one_device(
    make: Callable[[], Any], simulated_ranks: Callable[..., None]
) -> None:
    losses, states = [], []
    for ranks in (1, 4):
        torch.manual_seed(0)
        model, batch = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = dc.parallelize(model.eval())  # without dropout, whose masks both draw alike
        if ranks > 1:
            simulated_ranks(ranks, "data-tensor")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for _ in range(5):
            loss = net(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        losses.append(torch.tensor(found))
        states.append({name: p.detach().clone() for name, p in net.named_parameters()})
    assert losses[0][-1] < losses[0][0]
    assert float((losses[0] - losses[1]).abs().max() / losses[0].abs().max()) < 1e-5
    largest = max(float(value.abs().max()) for value in states[0].values())
    worst = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    assert worst / largest < 1e-5
