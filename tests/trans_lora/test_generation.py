"""Texts come out the same alone and in batches, with adapters and without, from a model at hand and from a server."""

import copy
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hosts import pissa
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from servers import Server as RunningServer
from tiny_adapters import moved
from tiny_transfers import SEEDS, answer, inputs, pretrained, teacher
from training_seeds import training_seed
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hf_ext import HfExtError, PissaConfig, ServerError
from hf_ext.trans_lora import Server
from hf_ext.trans_lora.encoding import Encoder
from hf_ext.trans_lora.generation import ModelGenerator, _End
from hf_ext.trans_lora.models import bare, base_of
from hf_ext.trans_lora.prompts import synthesis_prompt
from hf_ext.trans_lora.scoring import answer_log_probs, log_odds

PROMPTS = ["pick a b c", "sort", "Here are 10 examples:\n1. pick c a b\n2.", "find j i h g"]


def adapted(kind: str, adapter: str):
    model, tokenizer = pretrained(kind)
    task = "SEQ_2_SEQ_LM" if kind == "t5" else "CAUSAL_LM"
    configs = {
        "lora": partial(LoraConfig, target_modules="all-linear"),
        "pissa": partial(PissaConfig, r=4, target_modules="all-linear", init_lora_weights="pissa_niter_4"),
        "prompt_tuning": partial(PromptTuningConfig, num_virtual_tokens=3),
    }
    return (model if adapter == "none" else moved(get_peft_model(model, configs[adapter](task_type=task)), seed=3)), tokenizer


@pytest.mark.parametrize(("kind", "adapter"), [
    ("gpt2", "none"), ("gpt2", "prompt_tuning"), ("llama", "none"), ("llama", "lora"),
    pytest.param("llama", "pissa", marks=pissa), ("t5", "none"), ("t5", "lora"),
])  # fmt: skip
def test_a_batch_gives_what_each_prompt_gives_alone(kind, adapter):
    model, tokenizer = adapted(kind, adapter)
    write = ModelGenerator(model, Encoder(tokenizer, model), batch_size=4)
    together = write(PROMPTS, 12)
    assert together == [write([prompt], 12)[0] for prompt in PROMPTS]
    assert len({one.text for one in together}) > 1


@pytest.mark.parametrize("kind", ["bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100"])
def test_a_batch_shifts_no_position_of_an_encoder(kind):
    """Most of their positions are absolute."""
    _, tokenizer = pretrained("t5")
    torch.manual_seed(training_seed())
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 32))}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "forced_eos_token_id", "decoder_start_token_id"), end)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), d_model=32, init_std=0.5, pad_token_id=pad, **sizes, **ends)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    encoder = Encoder(tokenizer, model, "{input}")
    write = ModelGenerator(model, encoder, batch_size=4)
    assert write(PROMPTS, 8) == [write([prompt], 8)[0] for prompt in PROMPTS]
    samples = encoder.samples(PROMPTS, ["late", "early a", "a b c", "late"])
    together, alone = (answer_log_probs(model, encoder, samples, size) for size in (4, 1))
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(together, alone))


@pytest.mark.parametrize("adapter", ["lora", pytest.param("pissa", marks=pissa), "prompt_tuning"])
def test_without_its_adapter_a_model_is_its_base_again(adapter):
    (model, tokenizer), (plain, _) = adapted("llama", adapter), pretrained("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    tokens = torch.tensor([tokenizer("pick a b c")["input_ids"]])
    with torch.no_grad(), base_of(model) as base:
        assert torch.allclose(base(tokens).logits, plain.eval()(tokens).logits, atol=1e-5)
    assert trainable == [name for name, parameter in model.named_parameters() if parameter.requires_grad] != []
    with torch.no_grad():
        count = tokens.shape[1]
        assert not torch.allclose(model(tokens).logits[:, -count:], plain(tokens).logits, atol=1e-2)


@pytest.mark.parametrize("virtual", [0, 30])
def test_more_than_the_context_holds_is_an_error(virtual):
    """Virtual tokens take room in it."""
    model, tokenizer = pretrained("gpt2")
    if virtual:
        model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=virtual))
    encoder = Encoder(tokenizer, model, whose="The target's")
    long = "a b c d e f g h i j " * 27
    for write in (lambda: encoder.samples([long], ["early"]), lambda: ModelGenerator(model, encoder, 1)([long], 8)):
        with pytest.raises(HfExtError, match=f"the target's model's context holds {256 - virtual}"):
            write()
    with pytest.raises(HfExtError, match=f"context holds {256 - virtual}"):
        ModelGenerator(model, encoder, 4)(["pick a b c"], 300)


def test_sampling_is_seeded_and_keeps_the_global_random_state():
    model, tokenizer = pretrained("llama")
    write = ModelGenerator(model, Encoder(tokenizer, model), batch_size=2, options={"min_p": 0.01})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    sampling = {"temperature": 1.0, "top_p": 0.9}
    first = write(PROMPTS, 20, seed=1, **sampling)
    assert torch.equal(torch.rand(3), expected)
    assert first == write(PROMPTS, 20, seed=1, **sampling) != write(PROMPTS, 20, seed=2, **sampling)


def test_texts_depend_on_the_options_alone():
    model, tokenizer = pretrained("llama")
    encoder = Encoder(tokenizer, model)

    def write(**options):
        generator = ModelGenerator(model, encoder, 4, options=options)
        return generator(PROMPTS, 8), generator(PROMPTS, 20, seed=1, temperature=1.0, top_p=0.9)

    plain = write()
    odd = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2, "top_k": 1, "min_p": 0.9, "typical_p": 0.1}
    odd |= {"epsilon_cutoff": 0.5, "eta_cutoff": 0.5, "temperature": 0.1, "top_p": 0.1, "encoder_no_repeat_ngram_size": 2}
    odd |= {"num_beams": 4, "num_return_sequences": 2, "min_new_tokens": 4, "min_length": 9, "do_sample": True}
    for name, value in (odd | {"return_dict_in_generate": True}).items():
        setattr(model.generation_config, name, value)
    assert write() == plain
    assert write(repetition_penalty=5.0)[1] != plain[1]


def test_writing_ends_at_the_mark_and_says_so():
    model, tokenizer = pretrained("llama")
    write = ModelGenerator(model, Encoder(tokenizer, model), batch_size=8)
    whole = write([synthesis_prompt(SEEDS, 10)], 90)[0].text
    cut = write([synthesis_prompt(SEEDS, 10)], 90, stop="\n8.")[0]
    assert "\n8." in whole and cut.text == whole.partition("\n8.")[0] and cut.ended
    assert not write([synthesis_prompt(SEEDS, 10)], 5)[0].ended


def test_the_mark_is_seen_however_its_tokens_are_cut():
    _, tokenizer = pretrained("llama")
    rows = [tokenizer(text)["input_ids"] for text in ("pick a\n11. sort", "pick a\n11", "a\n1 1. b", "\n12. a\n11.")]
    for row in rows:
        text, stop = tokenizer.decode(row), "\n11."
        end = _End(tokenizer, 0, stop, None)
        steps = [bool(end(torch.tensor([row[:count]]), None)) for count in range(1, len(row) + 1)]
        at = next((i for i in range(len(row)) if stop in tokenizer.decode(row[: i + 1])), None)
        assert steps.index(True) == at if stop in text else not any(steps)


def test_a_text_that_never_ends_does_not_hold_up_its_batch():
    model, tokenizer = pretrained("llama")
    prompts, steps = ["pick c d e f g", synthesis_prompt(SEEDS, 10)], []

    def never_end_the_first(input_ids, scores):
        steps.append(1)
        scores[0] = -torch.inf
        scores[0, tokenizer(" a")["input_ids"][0]] = 0
        return scores

    options = {"logits_processor": [never_end_the_first]}
    write = ModelGenerator(model, Encoder(tokenizer, model), batch_size=2, options=options)
    sampling = {"seed": 0, "temperature": 1.0, "stop": "\n9."}
    _, numbered = write(prompts, 90, **sampling)
    assert len(steps) == 90
    steps.clear()
    endless, again = write(prompts, 90, **sampling, longest=20)
    assert len(steps) < 90 and again == numbered and again.ended and not endless.ended
    assert endless.text == " a" * 20


def test_an_answer_has_the_tokens_that_it_has_in_the_whole_text():
    model, tokenizer = pretrained("gpt2")
    for template, after in (("{input}", " early"), ("{input}\n", "early"), ("{input}:", " early")):
        encoder = Encoder(tokenizer, model, template)
        sample = encoder.samples([encoder.prompt("pick a b c")], ["early"])[0]
        assert tokenizer.decode(sample["input_ids"]) == encoder.prompt("pick a b c") + after + tokenizer.eos_token
        labels = [*tokenizer(after)["input_ids"], tokenizer.eos_token_id]
        assert [token for token in sample["labels"] if token != -100] == labels


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_answers_likelihood_under_an_encoder_decoder_is_the_sum_over_its_tokens(side):
    model, tokenizer = teacher("t5")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    encoder = Encoder(tokenizer, model, "{input}")
    texts, answers = [*inputs(5), "sort a"], [*map(answer, inputs(5)), "early early late"]
    log_probs = answer_log_probs(model, encoder, encoder.samples(texts, answers, end=False), batch_size=4)
    for text, said, scores in zip(texts, answers, log_probs):
        asked, tokens = tokenizer(text)["input_ids"], tokenizer(said, add_special_tokens=False)["input_ids"]
        start = [model.config.decoder_start_token_id, *tokens[:-1]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([asked]), decoder_input_ids=torch.tensor([start])).logits[0]
        assert torch.allclose(scores, logits.log_softmax(-1)[range(len(tokens)), tokens], atol=1e-4)


@pytest.mark.parametrize("adapter", ["none", "lora", "prompt_tuning"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scoring_computes_logits_of_the_answers_alone(kind, adapter):
    model, tokenizer = adapted(kind, adapter)
    encoder = Encoder(tokenizer, model, "{input}")
    texts, answers = inputs(5) + ["sort a", "find a b c d e f"], ["early"] * 5 + ["early late", "a"]
    samples = encoder.samples(texts, answers)
    sizes = []
    head = bare(model).get_output_embeddings()
    with head.register_forward_hook(lambda module, given, logits: sizes.append(logits.shape[0] * logits.shape[1])):
        log_probs = answer_log_probs(model, encoder, samples, batch_size=3)
    assert sum(sizes) == sum(len(scores) for scores in log_probs) == sum(x != -100 for s in samples for x in s["labels"])
    with torch.no_grad():
        for sample, scores in zip(samples, log_probs):
            row = torch.tensor([sample["input_ids"]])
            logits = model.eval()(row).logits[0, -row.shape[1] :].log_softmax(-1)
            at = range(row.shape[1] - len(scores), row.shape[1])
            assert torch.allclose(scores, torch.stack([logits[i - 1, row[0, i]] for i in at]), atol=1e-4)


@pytest.mark.parametrize("answers, passes", [((" Yes", " No"), 1), (("early late", " No"), 2)])
def test_answers_of_one_token_share_a_forward_pass(answers, passes):
    model, tokenizer = pretrained("llama")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([" Yes", " No"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    encoder, texts, asked = Encoder(tokenizer, model, "{input} "), inputs(4), []
    prompts = [encoder.prompt(text) for text in texts]
    with model.register_forward_hook(lambda *_: asked.append(1)):
        odds = log_odds(model, encoder, prompts, answers, batch_size=4)
    assert len(asked) == passes
    one, other = (answer_log_probs(model, encoder, encoder.samples(prompts, [said] * 4, False), 4) for said in answers)
    assert odds == pytest.approx([(a.sum() - b.sum()).item() for a, b in zip(one, other)], abs=1e-5)


def handling(respond: Callable[[dict], tuple[int, dict]]) -> ThreadingHTTPServer:
    """A server on loopback that gives these statuses and bodies to requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *arguments) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    return http


CHOICE = {"index": 0, "text": " early", "finish_reason": "stop", "logprobs": None}
COMPLETION = {"object": "text_completion", "choices": [CHOICE]}


@pytest.mark.parametrize("takes_penalties", [True, False])
def test_a_server_is_asked_for_no_penalties_if_it_takes_them(takes_penalties):
    requests = []

    def respond(request: dict) -> tuple[int, dict]:
        requests.append(request)
        refused = not takes_penalties and "repetition_penalty" in request
        return (422, {"error": {"message": "Unexpected keys"}}) if refused else (200, COMPLETION)

    with handling(respond) as http:
        server = Server(f"http://127.0.0.1:{http.server_port}/v1", "m", options={"min_p": 0.1})
        assert [one.text for one in server(["a", "b", "c"], 4)] == [" early"] * 3
        first = len(requests)
        server(["d"], 4)
        http.shutdown()
    assert len(requests) == first + 1 and requests[-1]["min_p"] == 0.1
    assert requests[0]["repetition_penalty"] == 1.0 and ("repetition_penalty" in requests[-1]) == takes_penalties


def test_a_server_that_refuses_or_is_gone_is_an_error():
    with handling(lambda request: (404, {"error": {"message": "no such model"}})) as http:
        url = f"http://127.0.0.1:{http.server_port}/v1"
        with pytest.raises(ServerError, match="no such model.*run again to resume"):
            Server(url, "nothing", retries=0)(["a"], 4)
        http.shutdown()
    with pytest.raises(ServerError, match=r"http://127.0.0.1:9/v1 does not answer after 1 retries"):
        Server("http://127.0.0.1:9/v1", "m", retries=1)(["a"], 4)


# ------------------------------------------------------------------------------------------------- `transformers serve`


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`transformers serve` on loopback, with a base model that samples and one with the task's adapter merged into it."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = pretrained("llama")
    model.generation_config.do_sample = True
    knowing, _ = teacher("llama")
    for name, each in (("base", model), ("knowing", knowing.merge_and_unload())):
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--device", "cpu"]
    with RunningServer(command, folder / "log", {"HF_HUB_OFFLINE": "1"}) as server:
        yield f"{server.url}/v1", folder


@pytest.mark.slow
def test_a_server_writes_what_the_model_at_hand_writes(served):
    url, folder = served
    model, tokenizer = teacher("llama")
    here = ModelGenerator(model, Encoder(tokenizer, model, "{input}"), 8)(inputs(8), 4)
    there = Server(url, str(folder / "knowing"), concurrency=4)(inputs(8), 4)
    assert [one.text.strip() for one in there] == [one.text.strip() for one in here] == [answer(text) for text in inputs(8)]
    assert all(one.ended for one in there)


@pytest.mark.slow
def test_a_server_samples_and_stops_at_the_mark(served):
    url, folder = served
    write = Server(url, str(folder / "base"), concurrency=2)
    texts = write([synthesis_prompt(SEEDS, 10)] * 4, 60, seed=0, temperature=1.0, stop="\n9.")
    assert len({one.text for one in texts}) == 4
    assert all("\n9." not in one.text for one in texts) and any(one.ended for one in texts)
