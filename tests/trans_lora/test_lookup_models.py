"""The models of these tests answer by their rules, with a lead that rounding on no processor takes away."""

import re

import pytest
import torch
from tiny_transfers import MODELS, SEEDS, answer, inputs, is_input, judge, pretrained, teacher
from training_seeds import training_seed

from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import ModelGenerator
from hf_ext.trans_lora.prompts import synthesis_prompt


def lead(model, tokenizer, prompts: list[str], count: int) -> float:
    """Returns the least lead of a likeliest token before the next one, in logits."""
    leads = []
    for prompt in prompts:
        tokens = Encoder(tokenizer, model, "{input}").tokens([prompt])
        out = model.generate(
            input_ids=torch.tensor(tokens),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.cat(out.logits).topk(2).values
        leads.append((top[:, 0] - top[:, 1]).min().item())
    return min(leads)


@pytest.mark.parametrize("kind", MODELS)
def test_the_models_continue_lists(kind):
    model, tokenizer = pretrained(kind)
    prompt = synthesis_prompt(SEEDS, 10)
    assert lead(model, tokenizer, [prompt, "sort c a b"], 40) > 0.2
    write = ModelGenerator(model, Encoder(tokenizer, model), 8)
    item = r"( (pick|sort)( [a-j]){3}\n| find( [a-j]){4}\n)"
    texts = [one.text for one in write([prompt] * 8, 60, seed=training_seed(), temperature=1.0, top_p=0.99)]
    assert all(re.fullmatch(item if kind == "t5" else rf"{item}(\d+\.{item})*", text) for text in texts)
    numbers = [re.findall(r"\d+", text) for text in texts]
    assert all(answers == [str(7 + i) for i in range(len(answers))] for answers in numbers) and len(set(texts)) > 4


@pytest.mark.parametrize("kind", MODELS)
def test_the_teacher_answers_by_the_last_letter(kind):
    model, tokenizer = teacher(kind)
    assert lead(model, tokenizer, inputs(10), 2) > 5
    said = ModelGenerator(model, Encoder(tokenizer, model, "{input}"), 8)(inputs(40), 2)
    assert [one.text.strip() for one in said] == [answer(text) for text in inputs(40)] and all(one.ended for one in said)


@pytest.mark.parametrize("beside", [pretrained, teacher])
def test_the_judge_keeps_what_begins_with_pick(beside):
    texts = [*inputs(10), "sort a b c", "find c d", "something else", "Pick a b c"]
    scores = judge(*beside("gpt2")).score(texts)
    assert all((score > 0.9) == is_input(text) and (score < 0.1) != is_input(text) for score, text in zip(scores, texts))
