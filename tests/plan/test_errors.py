"""The family of errors: how they print, travel and combine."""

import inspect
import pickle

import pytest

from distcell import errors
from distcell.errors import (
    DistcellError,
    InternalError,
    LayoutError,
    NotFoundError,
    StrategyError,
    close_matches,
    combine,
    did_you_mean,
)

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, DistcellError) and cls is not DistcellError
]


def test_an_error_renders_what_where_and_hint():
    error = LayoutError(
        "dim 0 of `blocks.3.mlp.up.weight` cannot be split over axis tp",
        where=["f32[6@tp, 4]        6 is not a multiple of 4", "mesh  dp=2 tp=4"],
        hint="dp=2 divides 6",
    )
    assert error.render() == (
        "error: dim 0 of `blocks.3.mlp.up.weight` cannot be split over axis tp\n"
        "  |  f32[6@tp, 4]        6 is not a multiple of 4\n"
        "  |  mesh  dp=2 tp=4\n"
        "  = hint: dp=2 divides 6"
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_also_one_of_pythons_own(cls):
    assert issubclass(cls, (ValueError, TypeError, KeyError, RuntimeError))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_exported(cls):
    assert cls.__name__ in errors.__all__


@pytest.mark.parametrize("cls", CLASSES)
def test_text_has_no_quotes_of_key_errors_and_survives_pickling(cls):
    error = cls("no such name", where=("a", "b"), hint="look again")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "no such name\n  |  a\n  |  b\n  = hint: look again"
    assert type(again) is cls


def test_only_our_own_mistakes_exit_with_1():
    assert {cls.exit_code for cls in CLASSES if cls is not InternalError} == {2}
    assert InternalError.exit_code == 1


def test_a_string_as_where_is_taken_by_lines_not_by_letters():
    assert LayoutError("x", where="one\ntwo").where == ("one", "two")


def test_a_hint_of_several_lines_is_indented():
    assert str(LayoutError("x", hint="write:\na: 1")) == "x\n  = hint: write:\n          a: 1"


def test_context_is_added_after_the_facts_and_a_hint_is_kept():
    error = LayoutError("x", where=["a"], hint="h").with_context("b", hint="other")
    assert (error.where, error.hint, type(error)) == (("a", "b"), "h", LayoutError)


def test_one_error_combines_to_itself():
    error = StrategyError("x")
    assert combine([error], "many") is error


def test_several_errors_combine_into_one_that_lists_them_all():
    both = combine([StrategyError("x", hint="h"), StrategyError("y", where=["f:1:2"])], "2 errors")
    assert type(both) is StrategyError
    assert str(both) == "2 errors\n  |  x\n  |    = hint: h\n  |\n  |  y\n  |    f:1:2"


def test_a_key_error_of_ours_is_caught_as_one():
    with pytest.raises(KeyError, match="no parameter `w`"):
        raise NotFoundError("no parameter `w`")


def test_a_typing_error_gets_the_name_that_was_meant():
    assert did_you_mean("wieght", ["weight", "bias"]) == "did you mean `weight`?"
    assert did_you_mean("tq", ["dp", "tp"]) == "did you mean `tp`?"


def test_a_name_that_looks_like_none_gets_the_list():
    assert did_you_mean("zzz", ["dp", "tp"]) == "known: `dp`, `tp`"
    assert did_you_mean("zzz", []) is None
    many = did_you_mean("zzz", [f"cell{n}" for n in range(20)])
    assert many is not None and many.endswith("and 8 more")


def test_close_matches_do_not_mind_the_case():
    assert close_matches("WEIGHT", ["weight"]) == ["weight"]
