"""Reading strategy files: every key, every mistake with its place."""

import contextlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distcell.errors import StrategyError
from distcell.strategy import CellRule, DimSpec, Strategy, TensorSpec, parse_dim

HEAD = "distcell: 1\nmesh: {dp: -1, tp: 2}\n"


def read(text: str) -> Strategy:
    return Strategy.from_text(text, source="s.yaml")


def refuse(text: str) -> str:
    with pytest.raises(StrategyError) as caught:
        read(text)
    return str(caught.value)


def only_input(text: str) -> TensorSpec:
    return read(HEAD + f"inputs: {{x: {text}}}").inputs[0][1]


def test_every_key_is_read():
    strategy = read(
        HEAD + "data: local\nuneven: false\nstrict: true\nrandom: torch\n"
        'inputs: {"*": [dp], tokens: [[dp, tp], _]}\n'
        "cells:\n"
        '  "**.up": {params: {weight: [tp, _], bias: [tp]}}\n'
        '  "**.mlp":\n'
        "    in: [[dp, _, _], null]\n"
        "    out: [[dp, tp?, ?]]\n"
        "    optional: true\n"
    )
    assert strategy == Strategy(
        mesh=(("dp", -1), ("tp", 2)),
        data="local",
        uneven=False,
        strict=True,
        random="torch",
        inputs=(("*", TensorSpec.of(["dp"])), ("tokens", TensorSpec.of([("dp", "tp"), None]))),
        cells=(
            CellRule(
                "**.up", {"weight": TensorSpec.of(["tp", None]), "bias": TensorSpec.of(["tp"])}
            ),
            CellRule(
                "**.mlp",
                inputs=(TensorSpec.of(["dp", None, None]), None),
                outputs=(TensorSpec.of(["dp", "tp?", "?"]),),
                optional=True,
            ),
        ),
    )


def test_what_is_left_out_has_its_default():
    assert read("distcell: 1") == Strategy()


def test_each_spec_knows_where_it_was_written():
    strategy = read(HEAD + 'cells:\n  "**.up": {params: {weight: [tp, _]}}\n')
    assert strategy.source == "s.yaml"
    assert strategy.cells[0].source == "s.yaml:4:3"
    assert strategy.cells[0].params["weight"].source == "s.yaml:4:30"


@pytest.mark.parametrize(
    ("written", "dim"),
    [
        ("_", DimSpec()),
        ("null", DimSpec()),
        ("~", DimSpec()),
        ("1", DimSpec()),
        ("4", DimSpec(slices=4)),
        ("tp", DimSpec(("tp",))),
        ("tp?", DimSpec(("tp",), open=True)),
        ('"tp?"', DimSpec(("tp",), open=True)),
        ("?", DimSpec(open=True)),
        ('"?"', DimSpec(open=True)),
        ("[dp, tp]", DimSpec(("dp", "tp"))),
        ("[dp, tp?]", DimSpec(("dp", "tp"), open=True)),
        ("[dp, ?]", DimSpec(("dp",), open=True)),
        ("[tp]", DimSpec(("tp",))),
    ],
)
def test_a_dim_reads_as_the_grammar_says(written, dim):
    assert only_input(f"[{written}]").dims == (dim,)
    assert only_input(f"[_, {written}, _]").dims == (DimSpec(), dim, DimSpec())


def test_a_block_list_reads_like_a_flow_list():
    text = HEAD + "inputs:\n  x:\n    - dp\n    - ?\n    - tp?\n"
    assert read(text).inputs[0][1] == TensorSpec.of(["dp", "?", "tp?"])


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("mesh: {dp: -1}", "the key `distcell` is missing", "s.yaml:1:1"),
        ("distcell: 2", "version 2", "s.yaml:1:11"),
        ("- 1", "the file is a list", "s.yaml:1:1"),
        ("distcell: 1\nmehs: {dp: 1}", "unknown key `mehs` in the file", "s.yaml:2:1"),
        ("distcell: 1\nmesh: {dp: 1}\nmesh: {tp: 1}", "key `mesh` stands twice", "s.yaml:3:1"),
        ("distcell: 1\nmesh: {dp: 1, dp: 2}", "key `dp` stands twice in `mesh`", "s.yaml:2:15"),
        ("distcell: 1\nmesh: {}", "the mesh has no axes", "s.yaml:2:7"),
        ("distcell: 1\nmesh: 8", "`mesh` is `8`, not a mapping", "s.yaml:2:7"),
        ("distcell: 1\nmesh: {dp: 0}", "axis `dp` has size 0", "s.yaml:2:12"),
        ("distcell: 1\nmesh: {dp: -1, tp: -1}", "`dp` and `tp` both take the rest", "s.yaml:2:20"),
        ("distcell: 1\nmesh: {DP: 2}", "`DP` is not the name of an axis", "s.yaml:2:8"),
        (HEAD + "data: locl", "`data` is `locl`, not `full` or `local`", "s.yaml:3:7"),
        (HEAD + "random: dice", "not `counter` or `torch`", "s.yaml:3:9"),
        (HEAD + "inputs: {x: dp}", "not a list", "s.yaml:3:13"),
        (HEAD + "inputs: {x: [tq]}", "the mesh has no axis `tq`", "s.yaml:3:14"),
        (HEAD + "inputs: {x: [dp, dp]}", "axis `dp` is used twice on one tensor", "s.yaml:3:13"),
        (HEAD + "inputs: {x: [[dp, tp], tp]}", "axis `tp` is used twice", "s.yaml:3:13"),
        (HEAD + "inputs: {x: [0]}", "a dim cannot have 0 slices", "s.yaml:3:14"),
        (HEAD + "inputs: {x: [[]]}", "split over no axes", "s.yaml:3:14"),
        (HEAD + "inputs: {x: [[dp?, tp]]}", "`dp?` stands before other axes", "s.yaml:3:14"),
        (HEAD + "inputs: {x: [[dp, _]]}", "`_` stands among the axes", "s.yaml:3:14"),
        (HEAD + "inputs: {x: [{a: b}]}", "is a mapping, not a word", "s.yaml:3:14"),
        ("distcell: 1\ninputs: {x: [dp]}", "axis `dp`, but no `mesh` names it", "s.yaml:2:14"),
        (HEAD + "cells: {a: {parms: {}}}", "unknown key `parms` in cell `a`", "s.yaml:3:13"),
        (HEAD + "cells: {a: {optional: true}}", "cell `a` asks for nothing", "s.yaml:3:9"),
        (HEAD + "cells: {a: {in: [dp, _]}}", "`in` has `dp` where a list of dims", "s.yaml:3:18"),
        (HEAD + 'cells: {"a{b": {in: [[dp]]}}', "a brace that is not closed", "s.yaml:3:9"),
        (HEAD + 'cells: {"a**": {in: [[dp]]}}', "`**` within a component", "s.yaml:3:9"),
        (HEAD + 'cells: {"a..b": {in: [[dp]]}}', "an empty component", "s.yaml:3:9"),
        (HEAD + "strict:", "`strict` is empty, not true or false", "s.yaml:3:8"),
        ("a: b: c", "not YAML: mapping values are not allowed here", "s.yaml:1:5"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_column(text, message, place):
    error = refuse(text)
    assert message in error
    assert place in error


def test_the_excerpt_points_at_the_word():
    assert refuse("distcell: 1\ncells:\n  x: {parmas: {}}").startswith(
        "unknown key `parmas` in cell `x`\n"
        "  |  s.yaml:3:7\n"
        "  |      x: {parmas: {}}\n"
        "  |          ^^^^^^\n"
        "  = hint: did you mean `params`?"
    )


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("mesh: {no: 2}", "YAML reads as true or false"),
        ("mesh: {on: 2}", "YAML reads as true or false"),
        ('mesh: {"off": 2}', "`off` cannot name an axis"),
        ("mesh: {dp: 1e9}", "without exponent"),
        ("mesh: {dp: 010}", "octal"),
        ("mesh: {dp: 0o10}", "write all digits"),
        ("mesh: {dp: 0x10}", "write all digits"),
        ("mesh: {dp: 1:30}", "base 60"),
        ("mesh: {dp: 1_000}", "underscore"),
        ("mesh: {dp: 2.0}", "point"),
        ("mesh: {dp: +2}", "sign"),
        ('mesh: {dp: "2"}', "not a whole number"),
        ("strict: yes", "write `true` or `false`"),
        ("uneven: off", "write `true` or `false`"),
        ("inputs: {yes: [_]}", "YAML reads as true or false"),
        ("inputs: {x: [no]}", "YAML reads as true or false"),
        ("inputs: {x: [08]}", "octal"),
        ("inputs: {x: [2026-01-01]}", "not a whole number"),
        ("cells: {null: {in: [[_]]}}", "YAML reads as nothing"),
    ],
)
def test_what_yaml_reads_as_something_else_is_refused(written, reason):
    assert reason in refuse(f"distcell: 1\n{written}")


def test_a_pattern_that_needs_quotes_is_told_so():
    assert 'a name that begins with `*` needs quotes: `"*": [dp]`' in refuse(
        HEAD + "inputs: {*: [dp]}"
    )


def test_an_empty_file_and_two_documents_are_refused():
    assert "s.yaml is empty" in refuse("# nothing\n")
    assert "remove `---`" in refuse("distcell: 1\n---\ndistcell: 1\n")


def test_all_mistakes_of_a_file_are_listed_at_once():
    error = refuse(HEAD + "strict: yes\ndata: locl\ncells: {a: {in: [[tq]]}}")
    assert error.startswith("s.yaml has 3 errors\n")
    for place in ("s.yaml:3:9", "s.yaml:4:7", "s.yaml:5:19"):
        assert place in error


def test_a_mistake_in_the_mesh_does_not_make_every_axis_unknown():
    assert "no `mesh` names it" not in refuse("distcell: 1\nmesh: 8\ninputs: {x: [dp]}")


def test_anchors_may_be_used():
    strategy = read(HEAD + "inputs: {x: &split [dp, _], y: *split}")
    assert strategy.inputs[0][1] == strategy.inputs[1][1]


def test_text_that_contains_itself_does_not_hang():
    assert "not a word" in refuse(HEAD + "inputs: {x: &x [*x]}")


# -- from Python


@pytest.mark.parametrize("value", [True, 1.5, "Tp", "", "no", ("dp", 2), -1, "d.p"])
def test_a_value_that_is_no_dim_is_refused(value):
    with pytest.raises(StrategyError):
        parse_dim(value)


def test_numbers_of_slices_and_axis_names_are_both_dims():
    spec = TensorSpec.of((2, 1, None, ("dp", "tp")))
    assert str(spec) == "[2, _, _, [dp, tp]]"


def test_an_axis_used_twice_in_code_is_refused_with_the_spec():
    with pytest.raises(StrategyError, match=r"axis `tp` is used twice on one tensor") as caught:
        TensorSpec.of(("tp", "tp"), source="train.py:3")
    assert caught.value.where == ("[tp, tp]", "train.py:3")


def test_dims_left_out_are_not_split_and_too_many_are_refused():
    spec = TensorSpec.of(("dp",), source="s.yaml:3:4")
    assert spec.padded(3).dims == (DimSpec(("dp",)), DimSpec(), DimSpec())
    with pytest.raises(StrategyError, match="`x` has 0 dims, its strategy names 1") as caught:
        spec.padded(0, what="input `x`")
    assert "s.yaml:3:4" in caught.value.where


# -- round trip

AXES = st.sampled_from(["dp", "tp", "cp", "x_1"])
DIMS = st.one_of(
    st.just(DimSpec()),
    st.builds(DimSpec, open=st.just(True)),
    st.builds(DimSpec, slices=st.integers(2, 64)),
    st.builds(
        DimSpec,
        st.lists(AXES, min_size=1, max_size=3, unique=True).map(tuple),
        open=st.booleans(),
    ),
)
SPECS = (
    st.lists(DIMS, max_size=4)
    .map(lambda dims: TensorSpec(tuple(dims)))
    .filter(lambda spec: spec.axis_used_twice() is None)
)
NAMES = st.one_of(
    st.sampled_from(
        ["*", "**", "**.attn.{q,k}", "a.*.b", "no", "on", "1", "null", "", "x: y", "#"]
    ),
    st.text(
        st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="*{}."),
        max_size=8,
    ),
)
MAYBE_SPECS = st.none() | st.lists(st.none() | SPECS, max_size=3).map(tuple)
RULES = st.builds(
    CellRule,
    NAMES,
    st.dictionaries(NAMES, SPECS, max_size=3),
    MAYBE_SPECS,
    MAYBE_SPECS,
    st.booleans(),
).filter(lambda rule: rule.params or rule.inputs is not None or rule.outputs is not None)
MESHES = st.tuples(
    *(st.tuples(st.just(axis), st.integers(1, 8)) for axis in ("dp", "tp", "cp", "x_1"))
)
STRATEGIES = st.builds(
    Strategy,
    mesh=MESHES,
    data=st.sampled_from(["full", "local"]),
    uneven=st.booleans(),
    strict=st.booleans(),
    random=st.sampled_from(["counter", "torch"]),
    inputs=st.dictionaries(NAMES, SPECS, max_size=3).map(lambda found: tuple(found.items())),
    cells=st.lists(RULES, max_size=3, unique_by=lambda rule: rule.pattern).map(tuple),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(STRATEGIES)
def test_what_is_written_reads_back_as_the_same_strategy(strategy):
    again = Strategy.from_text(strategy.to_yaml())
    assert again == strategy
    assert again.digest == strategy.digest
    assert again.to_yaml() == strategy.to_yaml()


@given(SPECS)
def test_a_spec_prints_in_the_grammar_that_reads_it(spec):
    assert only_input_of_any_axes(str(spec)) == spec


def only_input_of_any_axes(text: str) -> TensorSpec:
    mesh = "mesh: {dp: 1, tp: 1, cp: 1, x_1: 1}"
    return read(f"distcell: 1\n{mesh}\ninputs: {{x: {text}}}").inputs[0][1]


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_our_error(text):
    for content in (text, f"distcell: 1\n{text}", HEAD + f"inputs: {{x: [{text}]}}"):
        with contextlib.suppress(StrategyError):
            read(content)


def test_a_digest_minds_the_wishes_and_not_the_place():
    one = Strategy.from_text("distcell: 1\nmesh: {dp: 2}", source="a.yaml")
    same = Strategy.from_text("# a comment\nmesh:\n  dp: 2\ndistcell: 1", source="b.yaml")
    other = Strategy.from_text("distcell: 1\nmesh: {dp: 4}")
    assert one.digest == same.digest != other.digest


def test_reading_a_strategy_does_not_need_torch():
    # The package itself may import torch; the modules of strategies must not ask for it.
    code = (
        "import sys, types, pathlib\n"
        "import importlib.util as u\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "package = types.ModuleType('distcell'); package.__path__ = [str(root)]\n"
        "sys.modules['distcell'] = package\n"
        "from distcell.strategy import Strategy\n"
        "Strategy.from_text('distcell: 1')\n"
        "assert 'torch' not in sys.modules\n"
    )
    import distcell.errors

    root = str(distcell.errors.__file__).rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code, root], check=True)
