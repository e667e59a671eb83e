"""A weight is found under every name that files and models have for it."""

import tracemalloc

import pytest

from hf_ext.storage.names import Names, Ties

BERT = Names(
    [
        "bert.encoder.layer.0.output.dense.weight",
        "bert.encoder.layer.0.output.LayerNorm.weight",
        "bert.encoder.layer.0.output.LayerNorm.bias",
        "bert.encoder.layer.1.output.dense.weight",
        "bert.embeddings.LayerNorm.gamma",
        "one.shared.weight",
        "two.shared.weight",
        "projector.0.weight",
        "scale",
    ]
)
LLAMA = Ties({"lm_head.weight": "model.embed_tokens.weight"})
LLAVA = Ties({"lm_head.weight": "model.language_model.embed_tokens.weight"})
T5 = Ties({f"{name}.weight": "shared.weight" for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")})
MASKED = Ties(
    {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
)
HEADS = Ties({f"class_embed.{i}.weight": "class_embed.0.weight" for i in (1, 2)})


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.0.output.dense.weight"),
        ("encoder.layer.0.output.dense.weight", "bert.encoder.layer.0.output.dense.weight"),
        ("model.bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.0.output.dense.weight"),
        ("bert.encoder.layer.0.output.LayerNorm.gamma", "bert.encoder.layer.0.output.LayerNorm.weight"),
        ("encoder.layer.0.output.LayerNorm.beta", "bert.encoder.layer.0.output.LayerNorm.bias"),
        ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma"),
        ("bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"),
        ("scale", "scale"),
        ("model.scale", None),  # one part alone says too little
        ("classifier.0.weight", None),  # and so do a number and one part
        ("classifier.weight", None),
        ("weight", None),
        ("", None),
        ("decoder.shared.weight", None),  # two have this ending
        ("bert.pooler.dense.weight_gamma", None),
    ],
)
def test_prefixes_and_old_names_do_not_hide_a_tensor(name, twin):
    assert BERT.twin_of(name) == twin


@pytest.mark.parametrize(
    ("ties", "names", "name", "twin"),
    [
        (LLAMA, ["model.embed_tokens.weight"], "lm_head.weight", "model.embed_tokens.weight"),
        (LLAMA, ["lm_head.weight"], "model.embed_tokens.weight", "lm_head.weight"),
        (LLAMA, ["lm_head.weight"], "embed_tokens.weight", "lm_head.weight"),
        (LLAMA, ["embed_tokens.weight"], "lm_head.weight", "embed_tokens.weight"),
        (LLAMA, ["lm_head.weight", "model.embed_tokens.weight"], "lm_head.weight", "lm_head.weight"),
        (LLAMA, ["model.embed_tokens.weight"], "score.weight", None),
        (LLAVA, ["language_model.model.embed_tokens.weight"], "language_model.lm_head.weight", 0),
        (LLAVA, ["language_model.lm_head.weight"], "language_model.model.embed_tokens.weight", 0),
        (T5, ["shared.weight"], "encoder.embed_tokens.weight", "shared.weight"),
        (T5, ["encoder.embed_tokens.weight"], "shared.weight", "encoder.embed_tokens.weight"),
        (T5, ["encoder.embed_tokens.weight"], "decoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
        (T5, ["lm_head.weight", "shared.weight"], "encoder.embed_tokens.weight", "shared.weight"),
        (MASKED, ["embeddings.word_embeddings.weight"], "cls.predictions.decoder.weight", 0),
        (MASKED, ["cls.predictions.decoder.weight"], "embeddings.word_embeddings.weight", 0),
        (MASKED, ["cls.predictions.bias"], "cls.predictions.decoder.bias", 0),
        (HEADS, ["class_embed.0.weight"], "class_embed.2.weight", "class_embed.0.weight"),
        (HEADS, ["class_embed.0.weight"], "classifier.2.weight", None),
        (Ties({}), ["model.embed_tokens.weight"], "lm_head.weight", None),
    ],
)
def test_a_tied_weight_is_found_under_each_of_its_names(ties, names, name, twin):
    assert Names(names).twin_of(name, ties) == (names[twin] if twin == 0 else twin)
    assert Names(names).twin_of(name) in (None, twin)  # without the ties, only prefixes count


@pytest.mark.parametrize(
    ("ties", "names", "groups"),
    [
        (LLAMA, ["model.norm.weight", "model.embed_tokens.weight"], [["model.embed_tokens.weight"]]),
        (LLAMA, ["embed_tokens.weight", "lm_head.weight"], [["embed_tokens.weight", "lm_head.weight"]]),
        (T5, ["encoder.embed_tokens.weight", "x.bias", "shared.weight"], [["shared.weight", "encoder.embed_tokens.weight"]]),
        (
            MASKED,
            ["cls.predictions.bias", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.bias"],
            [["cls.predictions.bias", "cls.predictions.decoder.bias"], ["bert.embeddings.word_embeddings.weight"]],
        ),
        (Ties({"b.w": "a.w", "c.w": "b.w"}), ["c.w", "a.w"], [["a.w", "c.w"]]),
        (Ties({}), ["lm_head.weight"], []),
    ],
)
def test_a_file_that_may_break_a_tie_has_several_names_of_one_weight(ties, names, groups):
    assert ties.groups(names) == groups


def test_a_name_of_many_parts_costs_no_memory():
    name = ".".join("x" * 30_000)
    tracemalloc.start()
    names = Names([name, "model.layer.weight"])
    assert names.twin_of("layer.weight") == "model.layer.weight" and names.twin_of(f"a.{name}") is None
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
