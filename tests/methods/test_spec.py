"""The text form of a method: what build makes of it, and what it says of a mistake."""

from typing import Literal, get_args

import pytest
import torch
from torch.testing import assert_close

from whence import METHODS, LagBias, LowRankBias, PositionMethod, Sum, attend, build
from whence.lag import Terms
from whence.methods.spec import instantiate, options_of, parse
from whence.nn import positioned_attention


def make(spec: str, **context) -> PositionMethod:
    return build(spec, **{"n_heads": 4, "d_head": 8, **context})


class Sample(PositionMethod):
    """One option of every kind that a text can hold."""

    def __init__(
        self,
        n_heads: int,
        *,
        whole: int = 1,
        real: float = 0.5,
        flag: bool = False,
        word: str = "a",
        choice: Literal["near", "far"] = "near",
        maybe: int | None = 3,
    ) -> None:
        super().__init__()
        self.given = (n_heads, whole, real, flag, word, choice, maybe)


def sample(options: dict[str, str], **context) -> tuple:
    return instantiate("sample", Sample, options, {"n_heads": 4, "d_model": 32, **context}).given


def test_parse_reads_names_options_and_sums():
    assert parse("tisa:kernels=5,reach=64+rope") == [
        ("tisa", {"kernels": "5", "reach": "64"}),
        ("rope", {}),
    ]
    assert parse(" tisa : kernels = 5 , reach=64 + rope ") == parse("tisa:kernels=5,reach=64+rope")
    assert parse("tisa:") == [("tisa", {})]


def test_a_name_alone_takes_the_defaults():
    method = make("tisa")
    assert type(method) is METHODS["tisa"]
    assert (method.n_heads, method.kernels, method.reach) == (4, 5, None)


def test_options_reach_the_constructor():
    method = make("shaw:left=3,right=1,values=false,per_head=yes")
    assert (method.left, method.right, method.values, method.per_head) == (3, 1, False, True)
    assert method.key_table.shape == (4, 5, 8)


@pytest.mark.parametrize(
    ("options", "index", "value"),
    [
        ({"whole": "-7"}, 1, -7),
        ({"real": "1e-3"}, 2, 0.001),
        ({"real": "2"}, 2, 2.0),
        *(({"flag": text}, 3, True) for text in ("true", "True", "yes", "on", "1")),
        *(({"flag": text}, 3, False) for text in ("false", "FALSE", "no", "off", "0")),
        ({"word": "b c"}, 4, "b c"),
        ({"choice": "far"}, 5, "far"),
        ({"maybe": "none"}, 6, None),
        ({"maybe": "None"}, 6, None),
        ({"maybe": "12"}, 6, 12),
    ],
)
def test_text_becomes_the_type_that_the_constructor_declares(options, index, value):
    got = sample(options)[index]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whole": "1.5"}, "sample:whole must be a whole number, got '1.5'"),
        ({"whole": ""}, "sample:whole must be a whole number, got ''"),
        ({"real": "much"}, "sample:real must be a number, got 'much'"),
        ({"flag": "maybe"}, "sample:flag must be true or false, got 'maybe'"),
        ({"choice": "fra"}, "Unknown value of sample:choice 'fra'. Did you mean 'far'"),
        ({"maybe": "x"}, "sample:maybe must be a whole number, got 'x'"),
        ({"hole": "3"}, "Unknown option of method 'sample': 'hole'. Did you mean 'whole'"),
        ({"self": "3"}, "Unknown option of method 'sample': 'self'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        sample(options)


def test_options_win_over_what_the_model_says():
    assert sample({"n_heads": "7"})[0] == 7
    assert make("tisa:n_heads=2").n_heads == 2
    assert make("t5:causal=false", causal=True).causal is False
    assert make("t5", causal=True).causal is True


def test_what_the_constructor_does_not_ask_for_is_not_given():
    assert sample({}, causal=True, n_layers=3) == (4, 1, 0.5, False, "a", "near", 3)


@pytest.mark.parametrize("spec", METHODS)
def test_every_method_refuses_an_option_it_does_not_have(spec):
    for key in ("nonsense", "args", "kwargs", "self"):
        with pytest.raises(ValueError, match=f"Unknown option of method '{spec}': '{key}'"):
            make(f"{spec}:{key}=1")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39", "-1e39", "1e400"])
def test_a_number_that_is_not_finite_in_float32_is_refused_as_text_and_in_python(name, value):
    context = {"n_heads": 4, "d_head": 8, "d_model": 32}
    for key, option in options_of(METHODS[name]).items():
        if float not in (option.annotation, *get_args(option.annotation)):
            continue
        with pytest.raises(ValueError, match=f"{key} must be a finite number"):
            make(f"{name}:{key}={value}")
        given = {k: v for k, v in context.items() if k in options_of(METHODS[name])}
        with pytest.raises(ValueError, match=f"{key} must be a finite number"):
            METHODS[name](**given, **{key: float(value)})


@pytest.mark.parametrize("spec", METHODS)
def test_a_size_beyond_all_models_is_refused_before_anything_is_made(spec):
    for size in ("n_heads", "d_head", "d_model", "max_length", "n_layers"):
        with pytest.raises(ValueError, match=f"{size} must be at most"):
            make(spec, **{size: 10**20})
    for key, option in options_of(METHODS[spec]).items():
        if int in (option.annotation, *get_args(option.annotation)):
            with pytest.raises(ValueError, match=f"{key} must be at most"):
                make(f"{spec}:{key}={10**20}")


def test_a_method_without_options_says_so():
    with pytest.raises(ValueError, match=r"Known: none\."):
        make("nope:clip=3")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tsia", "Unknown method 'tsia'. Did you mean 'tisa'.*Known: .*alibi"),
        ("shaw+albi", "Unknown method 'albi'. Did you mean 'alibi'"),
        ("xyzzy", r"Unknown method 'xyzzy'\. Known"),
        ("", "empty method name in ''. Write it like 'tisa:kernels=5' or 'tisa"),
        ("tisa++alibi", r"empty method name in 'tisa\+\+alibi'"),
        (":kernels=3", "empty method name in ':kernels=3'"),
        ("tisa:kernel=3", "Unknown option of method 'tisa': 'kernel'. Did you mean 'kernels'"),
        ("tisa:kernels", "option 'kernels' of method 'tisa' has no value"),
        ("tisa:kernels=3,kernels=5", "option 'kernels' of method 'tisa' is given twice"),
        ("tisa:kernels=0", "kernels must be at least 1, got 0"),
        ("shaw:clip=-1", "clip must be at least 0, got -1"),
        ("shaw:keys=false,values=false", "for neither use 'nope'"),
    ],
)
def test_a_mistake_in_the_text_is_an_error_with_the_way_out(spec, message):
    with pytest.raises(ValueError, match=message):
        make(spec)


@pytest.mark.parametrize("name", ["n_heads", "d_head", "max_length", "n_layers"])
def test_sizes_of_the_model_must_be_whole_and_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make("tisa", **{name: 0})


def test_a_sum_of_lag_biases_is_one_lag_bias():
    method = make("tisa+alibi")
    assert isinstance(method, Sum)
    place, q = torch.arange(6), torch.randn(2, 4, 6, 8)
    bias = method.score_term(q, place, place)
    assert isinstance(bias, LagBias)
    tisa, alibi = (part.score_term(q, place, place) for part in method.parts)
    want = tisa.to_dense(place, place) + alibi.to_dense(place, place)
    assert_close(bias.to_dense(place, place), want)


@pytest.mark.parametrize("spec", ["shaw+alibi", "shaw+t5+tisa", "t5+shaw:values=false,per_head=on"])
def test_a_band_for_each_query_and_a_shared_one_add_to_one_lag_bias(spec):
    method = make(spec).double()
    place, q = torch.arange(6), torch.randn(2, 4, 6, 8, dtype=torch.float64)
    bias = method.score_term(q, place, place)
    assert isinstance(bias, LagBias)
    parts = [part.score_term(q, place, place).to_dense(place, place) for part in method.parts]
    assert_close(bias.to_dense(place, place), sum(parts))


def test_a_sum_uses_the_sites_of_its_parts_and_counts_their_parameters():
    method = make("shaw:clip=2+tisa+nope")
    assert method.sites() == ("score", "value")
    assert make("alibi+tisa").sites() == ("score",)
    assert make("nope").sites() == ()
    assert method.n_parameters() == method.n_parameters_by_formula() == 2 * 5 * 8 + 3 * 5 * 4


def test_two_value_tables_add_up_in_attention():
    method = make("shaw:clip=1,keys=false+shaw:clip=3,keys=false").double()
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64).unbind()
    run = {"backend": "reference"}
    plain = attend(q, k, v, **run)
    parts = [positioned_attention(part, q, k, v, **run) - plain for part in method.parts]
    assert_close(positioned_attention(method, q, k, v, **run), plain + sum(parts))


def test_a_sum_of_nothing_is_refused():
    with pytest.raises(ValueError, match="Sum needs at least one method"):
        Sum()


def test_nope_changes_nothing():
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    got = positioned_attention(make("nope"), q, k, v, backend="reference")
    assert_close(got, attend(q, k, v, backend="reference"), rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["tisa", "alibi", "t5", "tisa+alibi"])
def test_a_method_for_another_number_of_heads_is_refused_by_attend(spec):
    q, k, v = torch.randn(3, 1, 6, 5, 8).unbind()
    with pytest.raises(ValueError, match="Was the method built for another number of heads"):
        positioned_attention(make(spec), q, k, v, backend="reference")


def test_lag_and_low_rank_terms_of_a_sum_stay_apart():
    class LowRank(PositionMethod):
        def score_term(self, q, q_pos, k_pos, *, content=None):
            ones = torch.ones(1, 1, len(q_pos), 1)
            return LowRankBias(ones, torch.arange(len(k_pos), dtype=ones.dtype).view(1, 1, -1, 1))

    place, q = torch.arange(5), torch.randn(1, 4, 5, 8)
    bias = Sum(make("alibi"), LowRank(), make("tisa")).score_term(q, place, place)
    assert isinstance(bias, Terms)
    assert isinstance(bias.lag, LagBias)
    assert bias.dense == ()
