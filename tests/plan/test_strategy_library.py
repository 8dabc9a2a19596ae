"""The strategy files that ship: found by name, equal where they should be, fitting the families."""

from pathlib import Path

import pytest
import yaml

from distcell import _resources
from distcell.errors import NotFoundError, StrategyError
from distcell.strategy import Strategy, list_strategies, load_strategy, resolve_cells

NAMES = ["data", "data-tensor", "sequence", "tensor"]
WITH_WEIGHTS = ["data-tensor", "sequence", "tensor"]


def layers(prefix: str, names: str, params: str = "weight bias") -> list[str]:
    return [f"{prefix}{name}.{param}" for name in names.split() for param in params.split()]


GPT = [
    *layers("", "embed pos head", "weight"),
    *layers("", "norm"),
    *layers("blocks.0.", "ln1 attn.q attn.k attn.v attn.o ln2 mlp.up mlp.down"),
]
LLAMA_BLOCK = [
    *layers("", "embed norm head", "weight"),
    *layers("blocks.0.", "ln1 ln2 attn.q attn.k attn.v attn.o mlp.gate mlp.up mlp.down", "weight"),
]
CNN = layers("", "conv1 bn1 conv2 bn2 fc1 fc2")
MLP = layers("layers.0.", "up down")
GPT2 = [
    *layers("transformer.", "wte wpe", "weight"),
    *layers("transformer.h.0.", "ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj"),
    "lm_head.weight",
]
LLAMA = [
    *layers("model.", "embed_tokens norm", "weight"),
    *layers("model.layers.0.self_attn.", "q_proj k_proj v_proj o_proj", "weight"),
    *layers("model.layers.0.mlp.", "gate_proj up_proj down_proj", "weight"),
    *layers("model.layers.0.", "input_layernorm post_attention_layernorm", "weight"),
    "lm_head.weight",
]
BERT_LAYER = "bert.encoder.layer.0."
BERT = [
    "bert.embeddings.word_embeddings.weight",
    *layers(f"{BERT_LAYER}attention.self.", "query key value"),
    *layers(BERT_LAYER, "attention.output.dense intermediate.dense output.dense"),
    *layers("cls.", "predictions.decoder"),
]
T5_BLOCK = "encoder.block.0.layer."
T5 = [
    "shared.weight",
    *layers(f"{T5_BLOCK}0.SelfAttention.", "q k v o relative_attention_bias", "weight"),
    *layers(f"{T5_BLOCK}1.DenseReluDense.", "wi wo", "weight"),
]
VIT_LAYER = "vit.encoder.layer.0."
VIT = [
    *layers(f"{VIT_LAYER}attention.attention.", "query key value"),
    *layers(VIT_LAYER, "attention.output.dense intermediate.dense output.dense"),
]
# Weights by whether their first dim is split, "column" for a linear layer's [out, in].
FAMILIES = {
    "ours": (GPT, "embed head attn.q attn.k attn.v mlp.up", "attn.o mlp.down"),
    "llama block": (
        LLAMA_BLOCK,
        "embed head attn.q attn.k attn.v mlp.gate mlp.up",
        "attn.o mlp.down",
    ),
    "cnn": (CNN, "conv1 fc1", "conv2 fc2"),
    "mlp": (MLP, "up", "down"),
    "gpt-2": (GPT2, "wte lm_head attn.c_proj mlp.c_proj", "c_attn c_fc"),
    "llama": (
        LLAMA,
        "embed_tokens q_proj k_proj v_proj gate_proj up_proj lm_head",
        "o_proj down_proj",
    ),
    "bert": (BERT, "word_embeddings query key value intermediate.dense decoder", "output.dense"),
    "t5": (T5, "shared SelfAttention.q k v wi", "SelfAttention.o wo relative_attention_bias"),
    "vit": (VIT, "query key value intermediate.dense", "output.dense"),
}
ROWS = (".o.", "down", "c_proj", "output.dense", "fc2", "conv2")


def cells_of(params: list[str]) -> list[str]:
    """All dotted prefixes of the parameters' paths."""
    paths = [path.split(".")[:-1] for path in params]
    return list(dict.fromkeys(".".join(p[:n]) for p in paths for n in range(len(p) + 1)))


def test_the_library_holds_these_strategies():
    assert [name for name in NAMES if name not in list_strategies()] == []


@pytest.mark.parametrize("name", list_strategies())
def test_a_file_of_the_library_is_sound_for_any_yaml_reader(name):
    strategy = load_strategy(name)
    assert strategy.source == f"strategies/{name}.yaml"
    assert Strategy.from_text(strategy.to_yaml()) == strategy
    text = (_resources.resource_dir("strategies") / f"{name}.yaml").read_text()
    assert yaml.safe_load(text)["distcell"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_about_strategies_name_it(name):
    assert f"`{name}`" in (_resources.resource_dir("strategies") / "README.md").read_text()


def test_every_cell_pattern_of_the_library_is_optional():
    rules = [rule for name in NAMES for rule in load_strategy(name).cells]
    assert all(rule.optional for rule in rules)


def test_what_tensor_says_of_weights_data_tensor_and_sequence_say_too():
    tensor = load_strategy("tensor").cells
    assert load_strategy("data-tensor").cells == tensor
    assert load_strategy("sequence").cells[: len(tensor)] == tensor


@pytest.mark.parametrize("name", WITH_WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_family_are_split_by_columns_and_rows(name, family):
    params, first, second = FAMILIES[family]
    found = resolve_cells(load_strategy(name), cells_of(params), params).params
    for words, place in ((first, 0), (second, 1)):
        for word in words.split():
            weights = [path for path in params if f".{path}".endswith(f".{word}.weight")]
            assert weights, word
            for path in weights:
                dims = found[path].dims
                assert [dim.axes for dim in dims] == [
                    ("tp",) if n == place else () for n in range(len(dims))
                ], path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bias_is_split_only_with_its_outputs(family):
    params, _, _ = FAMILIES[family]
    found = resolve_cells(load_strategy("tensor"), cells_of(params), params).params
    given = [path for path in found if path.endswith(".bias")]
    assert bool(given) == any(path.endswith(".bias") for path in params)
    for path in given:
        is_row = any(
            word in path for word in (".o.", "down", "c_proj", "output.dense", "fc2", "conv2")
        )
        assert bool(found[path].axes) != is_row, path


def test_the_order_of_a_sequence_is_split_between_blocks():
    found = resolve_cells(load_strategy("sequence"), cells_of(GPT), GPT).cells
    block, attn = found["blocks.0"], found["blocks.0.attn"]
    assert [str(spec) for spec in block.outputs or ()] == ["[dp, tp, _]"]
    assert [str(spec) for spec in attn.inputs or ()] == ["[dp, _, _]"]
    assert [str(spec) for spec in attn.outputs or ()] == ["[dp, tp, _]"]


def test_data_has_an_axis_for_any_number_of_ranks():
    assert load_strategy("data").mesh_for(7) == (("dp", 7),)


# -- finding


def test_a_misspelt_name_is_refused_with_the_closest_and_the_list():
    with pytest.raises(StrategyError, match="there is no strategy `tensr`") as caught:
        load_strategy("tensr")
    assert caught.value.hint == "did you mean `tensor`?"
    assert all(name in caught.value.where[0] for name in NAMES)


def test_a_name_like_none_is_told_how_a_file_is_given():
    with pytest.raises(StrategyError, match="there is no strategy `zzzzz`") as caught:
        load_strategy("zzzzz")
    assert caught.value.hint == "a file needs a path with `/` or `.yaml`"


def test_a_file_is_read_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("distcell: 1\nstrict: true\n")
    monkeypatch.chdir(tmp_path)
    for path in ("mine.yaml", "./mine.yaml", Path("mine.yaml"), tmp_path / "mine.yaml"):
        strategy = load_strategy(path)
        assert strategy.strict
        assert strategy.source == str(path)


def test_a_file_that_is_missing_is_refused_with_those_that_are_there(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("distcell: 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrategyError, match=r"there is no strategy file `mien\.yaml`") as caught:
        load_strategy("mien.yaml")
    assert caught.value.hint == "did you mean `mine.yaml`?"


def test_a_folder_and_bytes_are_refused(tmp_path):
    with pytest.raises(StrategyError, match="cannot be read"):
        load_strategy(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StrategyError, match="is not UTF-8"):
        load_strategy(tmp_path / "b.yaml")


def test_a_folder_of_the_same_name_does_not_hide_the_library(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_strategy("data").source == "strategies/data.yaml"


def test_a_file_without_ending_is_told_how_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("distcell: 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrategyError) as caught:
        load_strategy("mine")
    assert caught.value.hint == "is the file meant? write `./mine`"


def test_a_package_without_its_files_says_where_it_looked(monkeypatch, tmp_path):
    monkeypatch.setattr(_resources, "__file__", str(tmp_path / "distcell" / "_resources.py"))
    with pytest.raises(NotFoundError, match="folder `strategies` is missing"):
        _resources.resource_dir("strategies")
