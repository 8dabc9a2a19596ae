"""Patterns on cell paths, meshes for a number of ranks, and strategies fitted to models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcell.errors import StrategyError
from distcell.strategy import (
    DimSpec,
    Resolution,
    Strategy,
    matches,
    resolve_cells,
    resolve_inputs,
)

HEAD = "distcell: 1\nmesh: {dp: -1, tp: 2}\n"
CELLS = ["", "embed", "blocks"] + [
    f"blocks.{n}{part}"
    for n in range(2)
    for part in ("", ".attn", ".attn.q", ".attn.o", ".mlp", ".mlp.up", ".mlp.down")
]
PARAMS = ["embed.weight"] + [
    f"blocks.{n}.{layer}.{name}"
    for n in range(2)
    for layer in ("attn.q", "attn.o", "mlp.up", "mlp.down")
    for name in ("weight", "bias")
]


def strategy_of(cells: str, *, head: str = HEAD) -> Strategy:
    return Strategy.from_text(f"{head}cells:\n{cells}", source="s.yaml")


def resolve(cells: str) -> Resolution:
    return resolve_cells(strategy_of(cells), CELLS, PARAMS)


def refuse(cells: str) -> str:
    with pytest.raises(StrategyError) as caught:
        resolve(cells)
    return str(caught.value)


# -- patterns


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("attn", ["attn"], ["", "a.attn", "attn.q", "attnx"]),
        ("*", ["attn"], ["", "a.b"]),
        ("**", ["", "a", "a.b.c"], []),
        ("", [""], ["a"]),
        ("**.attn", ["attn", "a.attn", "a.b.attn"], ["xattn", "attn.q", ""]),
        ("blocks.**", ["blocks", "blocks.0", "blocks.0.attn"], ["blocks0", "x.blocks"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["ab", "a.xb", "a.b.c"]),
        ("**.**", ["", "a", "a.b"], []),
        ("a.**.**.b", ["a.b", "a.x.b"], ["a"]),
        ("blocks.*", ["blocks.0"], ["blocks", "blocks.0.attn"]),
        ("fc?", ["fc1", "fcx"], ["fc", "fc12", "fc."]),
        ("**.{q,k,v}", ["q", "attn.k"], ["qk", "attn.o"]),
        ("{a.b,c}.d", ["a.b.d", "c.d"], ["a.d", "b.d"]),
        ("l{0..2}", ["l0", "l1", "l2"], ["l3", "l"]),
        ("b.{0,{2..3}}", ["b.0", "b.2", "b.3"], ["b.1"]),
        ("a+b", ["a+b"], ["aab"]),
        ("ln{,_f}", ["ln", "ln_f"], ["ln_"]),
    ],
)
def test_a_pattern_matches_what_it_says(pattern, yes, no):
    assert [name for name in yes + no if matches(pattern, name)] == yes


NAME = st.lists(st.text("ab0_", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join)


@given(NAME)
def test_a_name_matches_itself_and_the_double_star(name):
    assert matches(name, name) and matches("**", name)
    assert matches(f"**.{name}", name) and matches(f"{name}.**", name)


@given(st.text("ab.*{},?01", max_size=10), NAME)
def test_any_pattern_is_matched_or_refused_with_our_error(pattern, name):
    try:
        matches(pattern, name)
    except StrategyError as error:
        assert pattern in str(error)


def test_a_pattern_that_stands_for_too_many_names_is_refused():
    with pytest.raises(StrategyError, match="stands for more than 4096 names"):
        matches("{0..99}.{0..99}", "1.1")
    with pytest.raises(StrategyError, match=r"has the range 9\.\.1"):
        matches("{9..1}", "1")


# -- meshes


def test_the_free_axis_takes_the_rest_of_the_ranks():
    assert Strategy(mesh=(("dp", -1), ("tp", 2))).mesh_for(8) == (("dp", 4), ("tp", 2))
    assert Strategy(mesh=(("dp", 2), ("tp", 4))).mesh_for(8) == (("dp", 2), ("tp", 4))


@given(st.integers(1, 200))
def test_without_a_mesh_it_is_the_prime_factors(num_ranks):
    product = 1
    for _, size in Strategy().mesh_for(num_ranks):
        assert size > 1
        product *= size
    assert product == num_ranks


def test_a_mesh_whose_product_is_not_the_number_of_ranks_is_refused_with_the_numbers():
    with pytest.raises(StrategyError) as caught:
        Strategy(mesh=(("dp", 2), ("tp", 2)), source="s.yaml").mesh_for(8)
    assert str(caught.value) == (
        "the mesh has 4 ranks, the job has 8\n"
        "  |  mesh  dp=2 tp=2     strategy  s.yaml\n"
        "  |  2 × 2 = 4, not 8 ranks\n"
        "  = hint: start 4 ranks, or change `mesh`; `dp: -1` takes whatever number there is"
    )


def test_a_rest_that_does_not_come_out_even_is_refused_with_counts_that_do():
    with pytest.raises(StrategyError, match=r"a multiple of 4 ranks, the job has 6") as caught:
        Strategy(mesh=(("dp", -1), ("tp", 4))).mesh_for(6)
    assert caught.value.hint == "start 4 or 8 ranks, or change `mesh`"


def test_no_ranks_at_all_are_refused():
    with pytest.raises(StrategyError, match="at least one rank"):
        Strategy().mesh_for(0)


# -- cells


def test_each_parameter_gets_its_spec_and_the_others_none():
    found = resolve('  "**.up": {params: {weight: [tp, _], bias: [tp]}}')
    assert {path: str(spec) for path, spec in found.params.items()} == {
        "blocks.0.mlp.up.weight": "[tp, _]",
        "blocks.0.mlp.up.bias": "[tp]",
        "blocks.1.mlp.up.weight": "[tp, _]",
        "blocks.1.mlp.up.bias": "[tp]",
    }
    assert found.params["blocks.1.mlp.up.weight"].source == "s.yaml:4:30"


def test_the_last_match_wins_field_by_field():
    found = resolve(
        '  "**.up": {params: {weight: [tp, _], bias: [tp]}, out: [[dp, _, tp]]}\n'
        "  blocks.1.mlp.up: {params: {weight: [_, tp]}, in: [[dp]]}"
    )
    assert str(found.params["blocks.1.mlp.up.weight"]) == "[_, tp]"
    assert str(found.params["blocks.1.mlp.up.bias"]) == "[tp]"
    assert str(found.params["blocks.0.mlp.up.weight"]) == "[tp, _]"
    last = found.cells["blocks.1.mlp.up"]
    assert last.outputs is not None and str(last.outputs[0]) == "[dp, _, tp]"
    assert (last.inputs_source, last.outputs_source) == ("s.yaml:5:3", "s.yaml:4:3")
    assert found.cells["blocks.0.mlp.up"].inputs is None


def test_a_parameter_can_be_named_from_a_cell_above_it_or_by_a_pattern():
    assert set(resolve('  "**.mlp": {params: {up.weight: [tp]}}').params) == {
        "blocks.0.mlp.up.weight",
        "blocks.1.mlp.up.weight",
    }
    assert set(resolve('  blocks.0.mlp: {params: {"*.bias": [tp]}}').params) == {
        "blocks.0.mlp.up.bias",
        "blocks.0.mlp.down.bias",
    }


def test_the_empty_pattern_is_the_outermost_cell():
    found = resolve('  "": {out: [[dp]], params: {embed.weight: [tp]}}')
    assert list(found.cells) == [""]
    assert list(found.params) == ["embed.weight"]


def test_a_pattern_that_matches_nothing_is_refused_with_the_closest_cells():
    error = refuse('  "**.mpl": {out: [[dp]]}')
    assert error.startswith("pattern `**.mpl` matches no cell\n  |  s.yaml:4:3")
    assert "did you mean `blocks.0.mlp`?" in error


def test_a_pattern_like_nothing_is_told_about_optional():
    assert "mark it `optional: true`" in refuse("  zzzzz: {out: [[dp]]}")


def test_an_optional_pattern_may_match_nothing_and_is_listed():
    found = resolve("  zzz: {out: [[dp]], optional: true}\n  embed: {params: {weight: [tp]}}")
    assert found.unmatched == ("zzz",)


def test_all_patterns_that_fit_nothing_are_listed_at_once():
    error = refuse("  aaa: {out: [[dp]]}\n  embed: {params: {wieght: [tp]}}\n  bbb: {out: [[dp]]}")
    assert error.startswith("s.yaml does not fit this model\n")
    assert "`aaa`" in error and "`bbb`" in error
    assert "cell `embed` has no parameter `wieght`" in error
    assert "did you mean `weight`?" in error


def test_a_misspelt_parameter_is_refused_even_where_the_pattern_is_optional():
    error = refuse("  embed: {params: {wieght: [tp]}, optional: true}")
    assert "did you mean `weight`?" in error


def test_a_family_pattern_may_name_a_bias_that_the_model_lacks():
    text = "  embed: {params: {weight: [tp], bias: [tp]}, optional: true}"
    assert list(resolve(text).params) == ["embed.weight"]
    assert "cell `embed` has no parameter `bias`" in refuse(text.replace(", optional: true", ""))


def test_tied_parameters_share_what_is_said_of_one():
    strategy = strategy_of("  embed: {params: {weight: [tp]}}")
    params = [*PARAMS, "head.weight"]
    tied = [("embed.weight", "head.weight")]
    found = resolve_cells(strategy, [*CELLS, "head"], params, tied=tied)
    assert found.params["head.weight"] == found.params["embed.weight"]


def test_tied_parameters_with_two_layouts_are_refused_with_both_places():
    text = "  embed: {params: {weight: [tp]}}\n  head: {params: {weight: [_, tp]}}"
    tied = [("embed.weight", "head.weight")]
    with pytest.raises(StrategyError, match="are one parameter") as caught:
        resolve_cells(strategy_of(text), [*CELLS, "head"], [*PARAMS, "head.weight"], tied=tied)
    assert "s.yaml:4:28" in str(caught.value) and "s.yaml:5:27" in str(caught.value)


def test_a_model_without_weights_to_split_is_told_so():
    strategy = strategy_of("  zzz: {params: {weight: [tp, _]}, optional: true}")
    with pytest.raises(StrategyError, match="matches a cell of this model") as caught:
        resolve_cells(strategy, ["", "relu"], [])
    assert caught.value.hint is not None and "`data`" in caught.value.hint


# -- inputs


def test_the_last_input_pattern_that_matches_wins():
    text = HEAD + 'inputs: {"*": [dp], mask: [], "t*": [_, dp]}'
    found = resolve_inputs(Strategy.from_text(text), ["x", "mask", "tokens"])
    assert {name: spec.dims for name, spec in found.items()} == {
        "x": (DimSpec(("dp",)),),
        "mask": (),
        "tokens": (DimSpec(), DimSpec(("dp",))),
    }


def test_an_input_pattern_that_matches_nothing_is_refused():
    strategy = Strategy.from_text(HEAD + "inputs: {tokns: [dp]}", source="s.yaml")
    with pytest.raises(StrategyError, match="`tokns` matches no input") as caught:
        resolve_inputs(strategy, ["tokens", "targets"])
    assert "s.yaml:3:17" in caught.value.where
    assert caught.value.hint == "did you mean `tokens`?"
