"""Native models, pass by pass: padding, packing, shared layers, checkpoints, losses, compiling."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from models import (
    BOTH_WAYS,
    GREEDY,
    LENGTH,
    SIZES,
    VOCAB,
    causal,
    kv_heads,
    prompts,
    seq2seq,
    shaken,
)
from whence.methods import METHODS
from whence.models import (
    WhenceConfig,
    WhenceForCausalLM,
    WhenceForConditionalGeneration,
    WhenceForMaskedLM,
    WhenceForSequenceClassification,
    WhenceModel,
    WhenceSeq2SeqConfig,
)
from whence.models.token_layout import token_layout


def masked(position: str, **more: Any) -> WhenceForMaskedLM:
    more = {"num_key_value_heads": kv_heads(position), **more}
    return shaken(WhenceForMaskedLM(WhenceConfig(position=position, **{**SIZES, **more})))


def padded(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    rows, ids, mask = prompts()
    if side == "right":
        for i, row in enumerate(rows):
            ids[i], mask[i] = 0, 0
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return rows, ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*BOTH_WAYS, "learned+fire:threshold=3", "tisa+rope"])
def test_padding_on_either_side_changes_no_token(name: str, side: str) -> None:
    model = masked(name)
    rows, ids, mask = padded(side)
    together = model(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        alone = model(row[None]).logits[0]
        torch.testing.assert_close(together[i][mask[i].bool()], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tisa+rope", "fire:threshold=3"])
def test_attention_weights_know_of_padding(name: str) -> None:
    model = causal(name)
    rows, ids, mask = padded("left")
    weights = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert len(weights) == 2
    assert weights[0].shape == (3, 4, 9, 9)
    for i, row in enumerate(rows):
        alone = model(row[None], output_attentions=True).attentions[1][0]
        torch.testing.assert_close(weights[1][i, :, -len(row) :, -len(row) :], alone)


@pytest.mark.parametrize("name", ["tisa+rope", "shaw", "fire:threshold=3"])
def test_a_loss_has_a_gradient_by_the_attention_weights(name: str) -> None:
    model = causal(name)
    _, ids, mask = padded("left")
    found = model(ids, attention_mask=mask, output_attentions=True)
    for weights in found.attentions:
        weights.retain_grad()
    found.logits.square().sum().backward()
    for weights in found.attentions:
        assert weights.grad is not None
        assert weights.grad[mask.bool()[:, None].expand(weights.shape[:3])].abs().max() > 0


def test_cross_attention_weights_have_a_gradient_too() -> None:
    model = seq2seq("t5")
    ids = torch.randint(2, VOCAB, (2, 5))
    found = model(ids, decoder_input_ids=ids, output_attentions=True)
    groups = (found.encoder_attentions, found.decoder_attentions, found.cross_attentions)
    for weights in [x for group in groups for x in group]:
        weights.retain_grad()
    found.logits.square().sum().backward()
    for weights in [x for group in groups for x in group]:
        assert weights.grad.abs().max() > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_packed_row_is_its_sequences_or_refused(name: str) -> None:
    model = causal(name)
    rows, _, _ = prompts()
    batch = DataCollatorWithFlattening(return_tensors="pt")(
        [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]
    )
    assert "attention_mask" not in batch
    if model.model.stack.position.whole.anchored:
        with pytest.raises(ValueError, match="depends on where its sequence starts"):
            model(**batch)
        return
    found = model(**batch)
    alone = torch.cat([model(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(found.logits[0], alone, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(found.loss)


def test_one_layer_for_all_with_positions_of_their_own_or_shared() -> None:
    own = causal("tisa:kernels=2", shared_layers=True, num_hidden_layers=3)
    one = causal("tisa:kernels=2", shared_layers=True, shared_positions=True, num_hidden_layers=3)
    assert len(own.model.stack.layers) == len(one.model.stack.layers) == 1
    counts = [sum(p.numel() for p in m.model.stack.position.parameters()) for m in (own, one)]
    assert counts == [3 * 3 * 2 * 4, 3 * 2 * 4]
    ids = torch.randint(2, VOCAB, (2, 9))
    # The same as a plain stack whose layers hold the same weights.
    plain = causal("tisa:kernels=2", num_hidden_layers=3)
    state = own.state_dict()
    for key in list(state):
        if "stack.layers.0" in key:
            for i in (1, 2):
                state[key.replace("stack.layers.0", f"stack.layers.{i}")] = state[key]
    plain.load_state_dict(state)
    torch.testing.assert_close(own(ids).logits, plain(ids).logits)
    for model in (own, one):
        steps, cache = [], None
        for part in ids.split(3, dim=1):
            found = model(part, past_key_values=cache, use_cache=True)
            steps.append(found.logits)
            cache = found.past_key_values
        torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["tisa+rope", "t5", "shaw+learned", "fire", "forget"])
def test_gradient_checkpointing_changes_no_number(name: str, reentrant: bool) -> None:
    model = causal(name, hidden_dropout=0.1, attention_dropout=0.1).train()
    ids = torch.randint(2, VOCAB, (2, 9))
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(5)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        # The reentrant kind runs its first pass without gradients, where attention rounds otherwise.
        tolerance = 1e-4 if reentrant else 0.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_an_encoder_decoder_can_be_checkpointed() -> None:
    model = seq2seq("tisa+t5").train()
    ids = torch.randint(2, VOCAB, (2, 9))
    losses = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids[:, :5]).loss.backward()
        losses.append(model.model.encoder.embed_tokens.weight.grad.clone())
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("kind", ["causal", "masked", "seq2seq"])
def test_the_loss_of_two_halves_is_that_of_the_whole(kind: str) -> None:
    """What Trainer does when it accumulates: a sum over the number of labels of all parts."""
    model = {"causal": causal, "masked": masked, "seq2seq": seq2seq}[kind]("tisa")
    ids = torch.randint(2, VOCAB, (4, 9))
    labels = ids.clone()
    labels[0, 2:] = -100
    counted = (labels[:, 1:] if kind == "causal" else labels).ne(-100).sum()
    whole = model(ids, labels=labels).loss
    parts = [
        model(ids[rows], labels=labels[rows], num_items_in_batch=counted).loss
        for rows in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)
    logits = model(ids, labels=labels).logits
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(whole, by_hand)


def test_labels_are_the_decoders_input_one_step_later() -> None:
    model = seq2seq("tisa")
    ids = torch.randint(2, VOCAB, (2, 6))
    labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    inputs = torch.tensor([[0, 5, 6], [0, 8, 9]])
    found = model(ids, labels=labels)
    torch.testing.assert_close(found.logits, model(ids, decoder_input_ids=inputs).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_a_classifier_looks_at_tokens_and_not_at_padding(pooling: str, side: str) -> None:
    config = WhenceConfig(
        position="tisa+learned", classifier_pooling=pooling, num_labels=3, pooler=True, **SIZES
    )
    model = shaken(WhenceForSequenceClassification(config))
    rows, ids, mask = padded(side)
    together = model(ids, attention_mask=mask).logits
    alone = torch.cat([model(row[None]).logits for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_classifier_has_the_losses_of_the_library() -> None:
    ids = torch.randint(2, VOCAB, (4, 9))
    for n_labels, labels in [
        (3, torch.tensor([0, 1, 2, 1])),
        (1, torch.randn(4)),
        (3, torch.rand(4, 3).round()),
    ]:
        config = WhenceConfig(num_labels=n_labels, causal=True, **SIZES)
        model = shaken(WhenceForSequenceClassification(config))
        loss = model(ids, labels=labels).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert model.config.classifier_pooling is None  # the last token, as it is causal
    whole = model(ids).logits
    torch.testing.assert_close(whole, model.classifier(model.model(ids).last_hidden_state[:, -1]))


def test_dropout_is_for_training_alone() -> None:
    options = dict.fromkeys(
        ("embedding_dropout", "hidden_dropout", "activation_dropout", "attention_dropout"), 0.3
    )
    model = causal("tisa", **options)
    ids = torch.randint(2, VOCAB, (2, 9))
    torch.testing.assert_close(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.allclose(model(ids).logits, model(ids).logits)


def test_masks_positions_and_inputs_that_do_not_fit_are_refused() -> None:
    model = causal("tisa+learned")
    ids = torch.randint(2, VOCAB, (2, 9))
    for arguments, message in [
        ({"attention_mask": torch.ones(2, 5)}, r"must cover cached and new tokens, \[2, 0 \+ 9\]"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, "mask of pairs would cost n x n memory"),
        ({"token_type_ids": torch.zeros_like(ids)}, "build it with type_vocab_size above 0"),
        ({"inputs_embeds": torch.zeros(2, 9, 24)}, "give either input_ids or inputs_embeds"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(ids, **arguments)
    with pytest.raises(ValueError, match=r"position_ids must be \[1 or 2, 9\], got \(2, 3\)"):
        token_layout(
            2,
            9,
            seen=0,
            attention_mask=None,
            position_ids=torch.zeros(2, 3, dtype=torch.long),
            anchored=False,
            device=ids.device,
        )
    with pytest.raises(ValueError, match=r"Learned knows positions 0\.\.31"):
        model(torch.randint(2, VOCAB, (1, LENGTH + 1)))
    with pytest.raises(TypeError, match="atention_mask"):
        model(ids, atention_mask=None)
    with pytest.raises(ValueError, match="no flow for grouped heads"):
        causal("floater", num_key_value_heads=2)(ids)


def test_embeddings_may_be_given_in_place_of_tokens() -> None:
    model = causal("tisa+sinusoidal")
    ids = torch.randint(2, VOCAB, (2, 9))
    given = model(inputs_embeds=model.model.embed_tokens(ids)).logits
    torch.testing.assert_close(given, model(ids).logits)
    as_tuple = model(ids, return_dict=False)
    torch.testing.assert_close(as_tuple[0], given)


def test_resized_embeddings_stay_tied_and_saved_models_stay_the_same() -> None:
    model = causal("tisa")
    model.resize_token_embeddings(VOCAB + 3)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model(torch.tensor([[VOCAB + 2]])).logits.shape == (1, 1, VOCAB + 3)


def test_every_parameter_of_every_method_has_a_gradient() -> None:
    ids = torch.randint(2, VOCAB, (2, 9))
    for name in METHODS:
        model = causal(name).train()
        model(ids, labels=ids).loss.backward()
        replaced = "replace" in METHODS[name].sites()  # then nothing asks for q and k
        for key, parameter in model.named_parameters():
            unused = replaced and key.endswith(("q_proj.weight", "k_proj.weight"))
            assert (parameter.grad is None) == unused, (name, key)


def test_a_cache_is_kept_where_it_is_of_use() -> None:
    model = causal("tisa")
    ids = torch.randint(2, VOCAB, (1, 9))
    assert model(ids).past_key_values is not None
    assert model(ids, labels=ids).past_key_values is None
    assert model(ids, use_cache=False).past_key_values is None
    model.train()
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None


@pytest.mark.triton
@pytest.mark.parametrize(
    "name",
    ["tisa:kernels=3+rope", *(pytest.param(x, marks=pytest.mark.slow) for x in ("shaw", "alibi"))],
)
def test_the_fused_kernels_run_it_with_padding_and_a_cache(name: str) -> None:
    plain = causal(name, backend="reference", head_dim=16)
    fused = causal(name, backend="fused", head_dim=16)
    fused.load_state_dict(plain.state_dict())
    _, ids, mask = prompts()
    at = mask.bool()
    found, wanted = (m(ids, attention_mask=mask).logits for m in (fused, plain))
    torch.testing.assert_close(found[at], wanted[at], rtol=1e-4, atol=1e-4)
    tokens = [
        m.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY) for m in (fused, plain)
    ]
    torch.testing.assert_close(tokens[0], tokens[1])


def test_the_base_model_is_bidirectional_unless_told() -> None:
    ids = torch.randint(2, VOCAB, (1, 9))
    for is_causal in (None, False, True):
        model = shaken(WhenceModel(WhenceConfig(position="tisa", causal=is_causal, **SIZES)))
        change = (model(ids)[0] - model(ids.roll(-1, 1).roll(1, 1))[0]).abs().max()
        assert change == 0
        other = ids.clone()
        other[0, -1] = (other[0, -1] + 1) % VOCAB
        moved = (model(ids)[0][0, 0] - model(other)[0][0, 0]).abs().max()
        assert (moved == 0) == bool(is_causal)
        assert (model(ids).past_key_values is not None) == bool(is_causal)


def test_one_config_serves_several_classes_and_a_models_own_says_what_it_is() -> None:
    config = WhenceConfig(**SIZES)
    models = (WhenceForCausalLM(config), WhenceForMaskedLM(config))
    assert [model.config.causal for model in models] == [True, False]
    assert not WhenceForSequenceClassification(config).config.causal
    assert config.causal is None
    with pytest.raises(ValueError, match="needs causal=False"):
        WhenceForMaskedLM(models[0].config)


def test_the_pooler_sees_the_first_token_and_not_padding() -> None:
    config = WhenceConfig(position="learned+tupe", pooler=True, **SIZES)
    model = shaken(WhenceModel(config), by=0.1)
    ids = torch.randint(2, VOCAB, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = model(ids, attention_mask=mask).pooler_output
    torch.testing.assert_close(found[:1], model(ids[:1, 3:]).pooler_output)
    torch.testing.assert_close(found[1:], model(ids[1:]).pooler_output)


def test_a_causal_model_with_a_pooler_takes_a_cache_and_a_mask() -> None:
    model = shaken(WhenceModel(WhenceConfig(position="tisa", causal=True, pooler=True, **SIZES)))
    ids = torch.randint(2, VOCAB, (1, 9))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    start = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
    rest = model(ids[:, 5:], attention_mask=mask, past_key_values=start.past_key_values)
    whole = model(ids, attention_mask=mask)
    torch.testing.assert_close(rest.last_hidden_state, whole.last_hidden_state[:, 5:])


@pytest.mark.parametrize("asked", ["by the config", "in the call"])
def test_outputs_may_be_tuples(asked: str) -> None:
    ids = torch.randint(2, VOCAB, (2, 5))
    given = {"return_dict": False} if asked == "in the call" else {}
    options = {"return_dict": False} if asked == "by the config" else {}
    config = WhenceConfig(**SIZES, **options)
    for cls in (WhenceForCausalLM, WhenceForMaskedLM, WhenceForSequenceClassification):
        model = cls(config).eval()
        found, wanted = model(ids, **given), model(ids, return_dict=True)
        torch.testing.assert_close(found[0], wanted.logits)
    translator = WhenceForConditionalGeneration(WhenceSeq2SeqConfig(**SIZES, **options)).eval()
    wanted = translator(ids, decoder_input_ids=ids, return_dict=True)
    found = translator(ids, decoder_input_ids=ids, **given)
    torch.testing.assert_close(found[0], wanted.logits)
    states = (wanted.encoder_last_hidden_state,)
    found = translator(encoder_outputs=states, decoder_input_ids=ids, return_dict=True)
    torch.testing.assert_close(found.logits, wanted.logits)


def test_a_window_of_a_model_that_is_not_causal_reaches_as_far_ahead() -> None:
    one = {**SIZES, "num_hidden_layers": 1}
    model = shaken(WhenceForMaskedLM(WhenceConfig(position="tisa", sliding_window=3, **one)))
    ids = torch.randint(2, VOCAB, (1, 9))
    other = ids.clone()
    other[0, 4] = (other[0, 4] + 1) % VOCAB
    moved = (model(ids).logits - model(other).logits)[0].abs().amax(dim=-1) > 0
    assert moved.nonzero()[:, 0].tolist() == [2, 3, 4, 5, 6]


def test_scaled_embeddings_are_those_of_a_table_that_is_larger() -> None:
    """The output layer, which shares the table, is not scaled; configs without the option are."""
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    scaled, plain = (
        WhenceForConditionalGeneration(
            WhenceSeq2SeqConfig(
                position="sinusoidal", scale_embeddings=on, tie_word_embeddings=False, **sizes
            )
        ).eval()
        for on in (True, False)
    )
    table = "model.encoder.embed_tokens.weight"
    assert 0.2 < float(scaled.state_dict()[table].std()) < 0.3  # 16^-0.5
    plain.load_state_dict(scaled.state_dict() | {table: 4 * scaled.state_dict()[table]})
    ids = torch.randint(30, (2, 5), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    torch.testing.assert_close(scaled(**given).logits, plain(**given).logits)
    inner = scaled.model.encoder.embed_tokens(ids)
    embeds = {"inputs_embeds": inner, "decoder_inputs_embeds": inner.flip(1)}
    torch.testing.assert_close(scaled(**embeds).logits, scaled(**given).logits)
    old = plain.config.to_dict()
    del old["scale_embeddings"], old["decoder_position"]
    assert not WhenceSeq2SeqConfig.from_dict(old).scale_embeddings


def test_a_decoder_may_have_a_position_of_its_own(tmp_path: Path) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = WhenceSeq2SeqConfig(position="shaw:clip=2", decoder_position="t5", **sizes)
    model = WhenceForConditionalGeneration(config).eval()
    names = [name for name in model.state_dict() if "position" in name]
    assert [name for name in names if "decoder" in name] == [
        "model.decoder.position.shared.t5.raw_table"
    ]
    assert all("shaw" in name for name in names if "encoder" in name)
    ids = torch.randint(2, 30, (2, 6), generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    again = WhenceForConditionalGeneration.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids, labels=ids).logits, model(ids, labels=ids).logits)
    with pytest.raises(ValueError, match="decoder_position must be a text"):
        WhenceSeq2SeqConfig(decoder_position=3, **sizes)
