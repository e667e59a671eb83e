"""Train two small language models, a GPT-2 and a Llama, from scratch in a few minutes, on text that a program writes.

    python examples/parts/tiny_language_models.py --data DIR --out tiny-models

The models differ in architecture, size and tokenizer, as base models of different families do. Their training text contains
what run_trans_lora.py requires, and what a large model has seen anyway: lists of exercises of one kind, stories that say who
lies, and questions with the answer Yes or No. It contains no answer to an exercise of the task web_of_lies. DIR is the folder
bbh of BIG-Bench Hard (github.com/suzgunmirac/BIG-Bench-Hard). The text contains no item of its web_of_lies, nor an item with
the same people in the same order.
"""

import argparse
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import tqdm

TASK = "web_of_lies"
OTHER_NAMES = """Adam Bella Carlos Diana Edgar Fiona George Hanna Igor Julia Kevin Laura Marcus Nadia Oscar Paula Quentin Rosa
Simon Tessa Ulrich Vera Walter Yvonne Zoe Bruno Clara Derek Emma Frank""".split()
VERBS = [("tells the truth", "lies"), ("is honest", "is a liar")]
QUESTIONS = ["Does {} tell the truth?", "Does {} lie?", "Is {} honest?"]
OPENINGS = ["Question: ", "Puzzle: ", ""]
STORIES = ["Story:", "Tale:", "News:", "Report:"]
NOTES = (" Sincere.", " Deceitful.")
WORDS = "apple bread chair dog egg fish grape hat ink jar key lamp moon nut oil pen quilt rope sun tree".split()
NAME = "[A-Z][a-z]*"
SAYS = "(?:" + "|".join(verb for pair in VERBS for verb in pair) + ")"
ASKS = "(?:" + "|".join(re.escape(question).replace(r"\{\}", NAME) for question in QUESTIONS) + ")"
PUZZLE = re.compile(f"(?:Question: |Puzzle: )?{NAME} {SAYS}\\.(?: {NAME} says {NAME} {SAYS}\\.)+ {ASKS}")


class World:
    """The subject of the text: people who speak of one another.

    Args:
        data: folder of BIG-Bench Hard, with the task's test items, whose people's names appear in the text as others do.
    """

    def __init__(self, data: Path):
        examples = json.loads((data / f"{TASK}.json").read_text(encoding="utf-8"))["examples"]
        self.test = [(example["input"], example["target"]) for example in examples]
        self.taken = {speakers(text) for text, _ in self.test}
        self.task_names = sorted({name for names in self.taken for name in names})
        self.names = self.task_names + OTHER_NAMES

    def people(
        self, draw: random.Random, count: int, names: list[str], true: float = 0.5
    ) -> tuple[list[str], list[bool], bool]:
        """Returns the speakers, whether each is said to tell the truth, and whether the last one does."""
        while True:
            who = draw.sample(names, count)
            if not any(tuple(who[i : i + 5]) in self.taken for i in range(max(1, count - 4))):
                break
        said = [draw.random() < true for _ in who]
        return who, said, said.count(False) % 2 == 0

    def puzzle(
        self,
        draw: random.Random,
        count: int = 5,
        opening: str = OPENINGS[0],
        verbs: tuple[str, str] = VERBS[0],
        question: str = QUESTIONS[0],
        names: list[str] | None = None,
    ) -> tuple[str, str]:
        """Returns an exercise and its answer, by default in the words of the task."""
        who, said, honest = self.people(draw, count, names or self.names)
        text = f"{opening}{' '.join(statements(who, said, verbs))} {question.format(who[-1])}"
        return text, "Yes" if honest != ("lie?" in question) else "No"

    def task_data(self, count: int, seed: int) -> list[tuple[str, str]]:
        """Returns different inputs of the task with their answers. None of them is a test item or a paraphrase of one."""
        draw, found = random.Random(f"task {seed}"), {}
        while len(found) < count:
            text, answer = self.puzzle(draw, names=self.task_names)
            found[text] = answer
        return list(found.items())

    @staticmethod
    def answer(text: str) -> str:
        """Returns the right answer to an exercise that makes sense."""
        lies = len(re.findall(r"lies\.|is a liar\.", text))
        return "Yes" if (lies % 2 == 0) != text.endswith("lie?") else "No"

    def puzzle_list(self, draw: random.Random) -> list[str]:
        """Returns ten exercises: four in the words of the first, the others in other words or with other numbers of people."""

        def style() -> dict:
            choices = {"opening": OPENINGS, "verbs": VERBS, "question": QUESTIONS, "count": range(2, 9)}
            return {name: draw.choice(values) for name, values in choices.items()}

        first = style() if draw.random() < 0.5 else {"count": 5}
        styles = [first]
        while len(styles) < 10:
            other = style()
            keys = ["opening", "verbs", "question"] if draw.random() < 0.8 else ["count"]
            changed = draw.sample(keys, draw.randint(1, len(keys))) if draw.random() > 0.4 else []
            styles.append(first | {key: other[key] for key in changed})
        return [self.puzzle(draw, **each)[0] for each in styles]

    def list_of_exercises(self, draw: random.Random) -> str:
        makers: list[Callable] = [arithmetic, walk, sorting]
        make = draw.choice(makers)
        items = self.puzzle_list(draw) if draw.random() < 0.7 else [make(draw) for _ in range(10)]
        return "\n".join(["Here are 10 examples:", *(f"{number}. {item}" for number, item in enumerate(items, 1))])

    def story(self, draw: random.Random) -> str:
        """Statements with a note on the last speaker, and sometimes on others, that says whether they lie."""
        count, true = draw.choice([1, 2, 2, 3, 3, 4, 5, 5]), draw.choice([0.5, 0.8])
        who, said, _ = self.people(draw, count, self.names, true)
        often = draw.choice([0, 0, 0.5, 1])
        text, honest = draw.choice(STORIES), True
        for i, sentence in enumerate(statements(who, said, VERBS[0] if draw.random() < 0.8 else VERBS[1])):
            honest ^= not said[i]
            text += f" {sentence}" + (NOTES[not honest] if i == count - 1 or draw.random() < often else "")
        return text

    def question(self, draw: random.Random) -> str:
        """Returns a question of another kind, with its answer."""
        kind = draw.randrange(3)
        if kind == 0:
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            asked, right = f"Is {a} greater than {b}?", a > b
        elif kind == 1:
            held = draw.sample(WORDS, draw.randint(2, 4))
            word = draw.choice(held if draw.random() < 0.5 else WORDS)
            asked, right = f"The bag holds: {', '.join(held)}. Is there a {word}?", word in held
        else:
            a, b = draw.choice(self.names), draw.choice(self.names)
            b = a if draw.random() < 0.5 else b
            asked, right = f"{a} tells the story. Does {b} tell the story?", a == b
        return f"Question: {asked}\nAnswer: {'Yes' if right else 'No'}"

    def documents(self, count: int, seed: int) -> Iterator[str]:
        draw = random.Random(seed)
        for _ in range(count):
            yield draw.choices([self.list_of_exercises, self.story, self.question], [6, 78, 16])[0](draw)

    def other_text(self, count: int, seed: int) -> list[str]:
        """Exercises that have nothing to do with the task."""
        draw = random.Random(seed)
        return [draw.choice([arithmetic, walk, sorting])(draw) for _ in range(count)]


def statements(who: list[str], said: list[bool], verbs: tuple[str, str]) -> list[str]:
    about = ["", *(f"{name} says " for name in who[1:])]
    subjects = [who[0], *who[:-1]]
    return [f"{says}{name} {verbs[not true]}." for says, name, true in zip(about, subjects, said)]


def arithmetic(draw: random.Random) -> str:
    terms = [f"{draw.randint(0, 9)} {draw.choice('+-*')} " for _ in range(draw.randint(1, 3))]
    return f"What is {''.join(terms)}{draw.randint(0, 9)}?"


def walk(draw: random.Random) -> str:
    moves = [f"Take {draw.randint(1, 9)} steps {draw.choice(['left', 'right', 'forward'])}." for _ in range(draw.randint(1, 3))]
    return f"Walk: {' '.join(moves)} Where are you?"


def sorting(draw: random.Random) -> str:
    return f"Sort these words: {', '.join(draw.sample(WORDS, draw.randint(3, 6)))}."


def speakers(text: str) -> tuple[str, ...]:
    """Returns the people of an exercise, in order."""
    return tuple(re.findall(rf"(?:^|[.:] )({NAME}) (?:says|tells|lies|is)\b", text))


def is_puzzle(text: str) -> bool:
    """Checks that a text is an exercise of the kind, in any words and with any number of people."""
    return bool(PUZZLE.fullmatch(text))


def makes_sense(text: str) -> bool:
    """Checks that a text is an exercise in which everyone speaks once, of the person before, and the last one is asked
    about."""
    who = speakers(text)
    asked = re.findall(rf"(?:Does|Is) ({NAME})", text)
    return is_puzzle(text) and len(set(who)) == len(who) and re.findall(rf"says ({NAME})", text) + asked[-1:] == list(who)


def is_task_like(text: str) -> bool:
    """Checks that a text is an exercise in the words of the task, of five people."""
    mine = text.startswith("Question: ") and text.endswith("tell the truth?") and not re.search("honest|liar", text)
    return mine and makes_sense(text) and len(speakers(text)) == 5


# ----------------------------------------------------------------------------------------------------------- the models

# What the tokenizers may join: a name, a digit, a run of other words with their signs, a line break.
PIECES = r"\n|{s}?[A-Z][a-z]*|{s}?\d|{s}?[^\s{s}A-Z\d]+(?:{s}[^\s{s}A-Z\d]+)*|{s}"


def gpt2_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with byte-level BPE."""
    inner = Tokenizer(BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES.format(s=" ")), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<|pad|>"], pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], pad_token=special[1])


def llama_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with BPE over characters, with spaces as ▁."""
    inner = Tokenizer(BPE(unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES.format(s="▁")), "isolated")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    special, alphabet = ["<unk>", "<s>", "</s>", "<pad>"], [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def gpt2(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    ends = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_layer=4,
            n_embd=112,
            n_head=4,
            n_positions=512,
            initializer_range=0.08,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **ends,
        )
    )
    with torch.no_grad():  # waves as the first positions, with which near tokens are found sooner
        positions = model.transformer.wpe.weight
        rates = torch.exp(-math.log(1000) * torch.arange(positions.shape[1] // 2) / (positions.shape[1] // 2))
        angles = torch.arange(len(positions))[:, None] * rates
        positions.copy_(0.08 * math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], 1))
    return model


def llama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=320,
            initializer_range=0.08,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


KINDS = {"source": (gpt2_tokenizer, gpt2, (600, 600)), "target": (llama_tokenizer, llama, (450, 450))}


def pretrain(world: World, kind: str, folder: Path, shorten: float = 1.0) -> None:
    """Trains a base model, on half of the processor's cores, and saves it with its tokenizer.

    First come short documents alone, from which following who lies is learned soonest, then lists in turn with them.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    torch.manual_seed(0)
    make_tokenizer, make_model, (short_steps, mixed_steps) = KINDS[kind]
    short_steps, mixed_steps = (max(2, int(steps * shorten)) for steps in (short_steps, mixed_steps))
    texts = list(world.documents(max(1000, int(60_000 * shorten)), seed=100))
    tokenizer = make_tokenizer(texts[:5000])
    model = make_model(tokenizer)
    rows = [row + [tokenizer.eos_token_id] for row in tokenizer(texts)["input_ids"]]
    pools = {True: [row for row in rows if 64 < len(row) <= 400], False: [row for row in rows if len(row) <= 64]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    total, at = short_steps + mixed_steps, {True: 0, False: 0}
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, 0.51 + 0.5 * math.cos(math.pi * step / total))
    )
    model.train()
    for step in tqdm(range(total), desc=f"Training the {kind} model", position=list(KINDS).index(kind)):
        long = step >= short_steps and step % 2 == 0
        batch = [pools[long][(at[long] + i) % len(pools[long])] for i in range(10 if long else 64)]
        at[long] += len(batch)
        width = max(map(len, batch))
        tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in batch])
        places = torch.arange(width).expand(len(batch), -1)
        if kind == "source" and not long:  # learned positions have to be met
            places = places + torch.randint(0, 300, (len(batch), 1)) * (torch.rand(len(batch), 1) < 0.5)
        logits = model(input_ids=tokens, position_ids=places).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@cache
def base_models(data: Path, folder: Path, shorten: float = 1.0) -> tuple[Path, Path]:
    """Returns the folders of the source and the target model. It trains them if they do not exist."""
    world = World(data)
    missing = [kind for kind in KINDS if not (folder / kind / "model.safetensors").exists()]
    with ProcessPoolExecutor(len(KINDS), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(pretrain, world, kind, folder / kind, shorten) for kind in missing]
    for job in jobs:
        job.result()
    return folder / "source", folder / "target"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with web_of_lies.json of BIG-Bench Hard")
    parser.add_argument("--out", type=Path, default=Path("tiny-models"), help="folder for the two models")
    args = parser.parse_args()
    print(*base_models(args.data, args.out), sep="\n")
