"""Decoding with a cache gives the very tokens of decoding without, for every method."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from models import GREEDY, LENGTH, SIZES, VOCAB, causal, prompts, seq2seq
from whence.methods import METHODS
from whence.models import WhenceConfig, WhenceForCausalLM, WhenceForMaskedLM

NEW = 5
MORE = ["fire:threshold=3", "tisa:kernels=3+rope", "learned+t5", "shaw+alibi", "forget+tupe"]


def logits_of(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, **more: Any) -> Any:
    done = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **GREEDY,
        **more,
    )
    return done.sequences, torch.stack(done.logits)


@pytest.mark.parametrize("name", [*METHODS, *MORE])
def test_with_a_cache_as_without_and_padded_as_alone(name: str) -> None:
    model = causal(name)
    rows, ids, mask = prompts()
    tokens, logits = logits_of(model, ids, mask, use_cache=False)
    # The next test has a static cache for every method; here it is padded, too.
    for cache in ({}, {"cache_implementation": "static"}) if name in MORE else ({},):
        cached, cached_logits = logits_of(model, ids, mask, **cache)
        torch.testing.assert_close(cached, tokens)
        torch.testing.assert_close(cached_logits, logits, rtol=1e-4, atol=1e-4)
    for i, row in enumerate(rows):
        alone, alone_logits = logits_of(model, row[None], None)
        torch.testing.assert_close(alone[0, len(row) :], tokens[i, ids.shape[1] :])
        torch.testing.assert_close(alone_logits[:, 0], logits[:, i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_at_a_time_gives_the_logits_of_the_whole(name: str) -> None:
    model = causal(name)
    ids = torch.randint(2, VOCAB, (2, 11))
    whole = model(ids, use_cache=False).logits
    for cache in (
        DynamicCache(config=model.config),
        DynamicCache(),
        StaticCache(config=model.config, max_cache_len=16),
    ):
        steps = [
            model(part, past_key_values=cache).logits for part in ids.split([4, 1, 3, 1, 1, 1], 1)
        ]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)


BEAMS = ("learned", "shaw", "tisa", "cope", "floater", "synthesizer", "tupe", "rope", "fire")
BEAMS += ("forget", "deberta")  # one of each kind: where it enters, and what a cache must know


@pytest.mark.parametrize(
    "name", [x if x in BEAMS else pytest.param(x, marks=pytest.mark.slow) for x in METHODS]
)
def test_beams_are_the_same_with_a_cache(name: str) -> None:
    model = causal(name)
    _, ids, mask = prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": 4, "num_beams": 3, **GREEDY}
    torch.testing.assert_close(
        model.generate(ids, **arguments), model.generate(ids, use_cache=False, **arguments)
    )


@pytest.mark.parametrize("name", ["tisa+rope", "forget", "learned", "fire"])
def test_sampling_and_an_assistant_come_from_the_library(name: str) -> None:
    model, helper = causal(name), causal("alibi", num_hidden_layers=1)
    ids = torch.randint(2, VOCAB, (1, 5))
    greedy = model.generate(ids, max_new_tokens=NEW, **GREEDY)
    assisted = model.generate(ids, max_new_tokens=NEW, assistant_model=helper, **GREEDY)
    torch.testing.assert_close(assisted, greedy)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        arguments = {"do_sample": True, "top_k": 5, "pad_token_id": 0, "use_cache": use_cache}
        drawn.append(model.generate(ids, max_new_tokens=NEW, **arguments))
    torch.testing.assert_close(drawn[0], drawn[1])


@pytest.mark.parametrize(
    "name", ["tisa+rope", "forget", "cope", "fire:threshold=3", "shaw", "learned"]
)
def test_a_sliding_window_may_drop_what_it_no_longer_sees(name: str) -> None:
    model = causal(name, sliding_window=4)
    ids = torch.randint(2, VOCAB, (2, 12))
    whole = model(ids, use_cache=False).logits
    for cache in (
        DynamicCache(config=model.config),
        DynamicCache(),
        StaticCache(config=model.config, max_cache_len=16),
    ):
        steps = [
            model(part, past_key_values=cache).logits for part in ids.split([3, 1, 5, 1, 1, 1], 1)
        ]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)
    _, padded, mask = prompts()
    tokens, logits = logits_of(model, padded, mask, use_cache=False)
    for cache in ({}, {"cache_implementation": "static"}):
        cached, cached_logits = logits_of(model, padded, mask, **cache)
        torch.testing.assert_close(cached, tokens)
        torch.testing.assert_close(cached_logits, logits, rtol=1e-4, atol=1e-4)


def test_a_window_is_that_of_the_library() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    theirs = MistralForCausalLM(
        MistralConfig(**{**SIZES, "num_key_value_heads": 2}, sliding_window=3)
    ).eval()
    ours = causal("rope", sliding_window=3, norm_eps=theirs.config.rms_norm_eps)
    ours.config.tie_word_embeddings = False
    state = {
        k.replace("model.layers", "model.stack.layers"): v for k, v in theirs.state_dict().items()
    }
    state = {k.replace("model.norm", "model.stack.norm"): v for k, v in state.items()}
    state = {k.replace("input_layernorm", "attention_norm"): v for k, v in state.items()}
    state = {k.replace("post_attention_layernorm", "mlp_norm"): v for k, v in state.items()}
    ours.lm_head.weight = torch.nn.Parameter(state["lm_head.weight"].clone())
    ours.load_state_dict(state)
    ids = torch.randint(2, VOCAB, (2, 12))
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["learned", "tupe", "synthesizer", "table2d", "tisa+learned"])
def test_a_method_with_a_table_says_at_once_that_it_cannot_go_further(name: str) -> None:
    model = causal(name)
    ids = torch.randint(2, VOCAB, (1, 5))
    limit = model.model.stack.position.max_length()
    assert limit >= LENGTH  # a grid may hold a few more
    assert model.generate(ids, max_length=limit, **GREEDY).shape == (1, limit)
    with pytest.raises(ValueError, match=f"knows {limit} positions and cannot decode to a length"):
        model.generate(ids, max_length=limit + 1, **GREEDY)


def test_a_rotation_that_depends_on_the_length_says_at_once_that_it_has_no_cache() -> None:
    model = causal("rope:scaling=dynamic,factor=2,original_length=8")
    ids = torch.randint(2, VOCAB, (1, 5))
    with pytest.raises(ValueError, match=r"a cache cannot be kept. Generate with use_cache=False"):
        model.generate(ids, max_new_tokens=NEW, **GREEDY)
    rows, padded, mask = prompts()
    together = model.generate(
        padded, attention_mask=mask, use_cache=False, max_new_tokens=NEW, **GREEDY
    )
    for i, row in enumerate(rows):
        alone = model.generate(row[None], use_cache=False, max_new_tokens=NEW, **GREEDY)
        torch.testing.assert_close(alone[0, len(row) :], together[i, 9:])
    start = model(ids, use_cache=True)
    with pytest.raises(ValueError, match=r"cached ones are out of date: pass use_cache=False"):
        model(ids[:, :1], past_key_values=start.past_key_values)


def test_a_model_that_looks_ahead_cannot_be_a_causal_one() -> None:
    with pytest.raises(ValueError, match="causal language model needs causal=True"):
        WhenceForCausalLM(WhenceConfig(causal=False, **SIZES))
    with pytest.raises(ValueError, match="masked language model needs causal=False"):
        WhenceForMaskedLM(WhenceConfig(causal=True, **SIZES))
    with pytest.raises(ValueError, match="'cope' is for causal attention alone"):
        WhenceForMaskedLM(WhenceConfig(position="cope", **SIZES))
    assert not WhenceForMaskedLM(WhenceConfig(**SIZES)).can_generate()


@pytest.mark.parametrize("name", ["tisa+rope", "t5", "learned", "floater", "tupe", "shaw"])
def test_an_encoder_decoder_decodes_with_a_cache_as_without(name: str) -> None:
    model = seq2seq(name)
    rows, ids, mask = prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "min_new_tokens": NEW, **GREEDY}
    tokens = model.generate(ids, use_cache=False, **arguments)
    torch.testing.assert_close(model.generate(ids, **arguments), tokens)
    torch.testing.assert_close(
        model.generate(ids, cache_implementation="static", **arguments), tokens
    )
    beams = {"num_beams": 3, **arguments}
    torch.testing.assert_close(
        model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams)
    )
    arguments.pop("attention_mask")
    for i, row in enumerate(rows):
        torch.testing.assert_close(model.generate(row[None], **arguments)[0], tokens[i])


def test_cross_attention_has_no_position() -> None:
    """Moving the encoder's output about, as a set, changes nothing in the decoder."""
    for name in ("tisa", "t5", "rope", "learned"):
        model = seq2seq(name)
        assert not any("cross" in key and "position" in key for key in model.state_dict())
        ids = torch.randint(2, VOCAB, (1, 8))
        memory = model.get_encoder()(ids)
        target = torch.randint(2, VOCAB, (1, 5))
        order = torch.randperm(8)
        before = model(encoder_outputs=memory, decoder_input_ids=target).logits
        memory.last_hidden_state = memory.last_hidden_state[:, order]
        after = model(encoder_outputs=memory, decoder_input_ids=target).logits
        torch.testing.assert_close(before, after)
