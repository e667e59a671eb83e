"""Language models whose weights are written by hand, so that their answers are known and no training decides them.

Alone, a model continues numbered lists: after "6." comes a word, then three letters ("find": four), a line break and the next
number. A table gives the next token after each token. Three heads of attention look back: three or four tokens to the word, to
end an item, and six tokens to the item's number, to count on. A T5 writes one item; after a text with an early letter at its
end, it begins with "sort". Asked whether a text belongs to the task, a model says "Yes", with odds above 4.

Adapters change the answers: with `write_teacher` a model says whether the last letter is an early one, with `write_judge` it
says "Yes" only of texts that begin with "pick".

The hidden state is a vector of named features. GPT-2's norms subtract the mean, so its hidden state has all features twice, the
second time negated. The other weights stay those of a new model, small and random, so that adapters can be trained.
"""

from __future__ import annotations

import math

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

EARLY, LATE = [f" {letter}" for letter in "abcde"], [f" {letter}" for letter in "fghij"]
LETTERS = EARLY + LATE
FIRST, WORDS = ["pick", "sort", "find"], [" pick", " sort", " find"]
NUMBERS = [str(i) for i in range(1, 11)]
ANSWERS = [" early", " late"]
FREQUENCIES = [1.0, 10**-0.5, 0.1]  # radians per token: the first ones of rotary embeddings with heads of 16 dimensions
WIDTH = 64
Rows = dict[int, torch.Tensor]
Moves = list[tuple[torch.Tensor, torch.Tensor]]  # of features: from, to

TOKENS = [*FIRST, *WORDS, *LETTERS, *NUMBERS, *ANSWERS, "\n", ".", "?", " Yes", " No", "<end>", "<pad>", "other"]
SEEN = ["one", "item ends", *(f"item {i}" for i in NUMBERS), "before: early", "before: late", "begins with pick"]
SAID = ["says early", "says late", "is real", "starts with sort"]
PLACES = [f"{wave} {i}" for i in range(len(FREQUENCIES)) for wave in ("cos", "sin")]
FEATURES = {name: i for i, name in enumerate([*TOKENS, *SEEN, *SAID, *PLACES])}

# (next token, feature): its logit before the last norm, which multiplies by 4 to 6. Steps of 0.1 make one token the likeliest,
# steps of 3 and more make a token all but certain.
TABLE: dict[tuple[str, str], float] = {(".", number): 3 for number in NUMBERS}
for start in (".", "<pad>"):
    TABLE |= {(word, start): 3 + step for word, step in zip(WORDS, (0.2, 0.0, -0.1))}
for i, before in enumerate([*LETTERS, *WORDS, *FIRST]):
    TABLE |= {(letter, before): 3 - 0.1 * ((j - 3 * i - 1) % 10) for j, letter in enumerate(LETTERS)}
TABLE |= {("\n", "item ends"): 8, ("<end>", "\n"): 3}
TABLE |= {(after, f"item {number}"): 6 for number, after in zip(NUMBERS, NUMBERS[1:])}
TABLE |= {(answer, f"says{answer}"): 8 for answer in ANSWERS} | {("<end>", answer): 3 for answer in ANSWERS}
TABLE |= {(answer, before): -16 for answer in ANSWERS for before in ANSWERS}
TABLE |= {(" sort", "starts with sort"): 0.4}
TABLE |= {(said, "?"): 8 for said in (" Yes", " No")} | {("<end>", said): 8 for said in (" Yes", " No")}
TABLE |= {(" No", "one"): -0.5, (" Yes", "is real"): 0.5, (" No", "is real"): -0.5}


def feature(*names: str, times: float = 1.0) -> torch.Tensor:
    """Returns the sum of features, (WIDTH,)."""
    vector = torch.zeros(WIDTH)
    vector[[FEATURES[name] for name in names]] = times
    return vector


class Writer:
    """Adds rules to the weights of a GPT-2, Llama or T5, or of a LoRA on one."""

    def __init__(self, model: PreTrainedModel | PeftModel):
        self.model = model.get_base_model() if isinstance(model, PeftModel) else model
        self.gpt2, self.t5 = isinstance(self.model, GPT2LMHeadModel), isinstance(self.model, T5ForConditionalGeneration)
        self.scale = math.sqrt(WIDTH / (2 + len(FREQUENCIES) * self.gpt2))  # by which a norm multiplies a token's features
        self.heads = self.model.config.num_attention_heads
        self.size = self.model.config.hidden_size // self.heads  # of a head
        names = "c_attn c_attn c_attn c_proj" if self.gpt2 else "q k v o" if self.t5 else "q_proj k_proj v_proj o_proj"
        self.names = dict(zip("qkvo", names.split()))

    def wide(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns features as they are in the hidden state."""
        return torch.cat([vector, -vector], -1) if self.gpt2 else vector

    def reads(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns weights that read features, which a norm has scaled."""
        return self.wide(vector) / (self.scale * (1 + self.gpt2))

    def add(self, module: nn.Module, out: torch.Tensor, into: torch.Tensor) -> None:
        """Adds a matrix of rank 1; to a LoRA, as the next of its ranks."""
        if isinstance(module, LoraLayer):
            ((name, A),) = module.lora_A.items()
            A, B = A.weight, module.lora_B[name].weight
            rank = int(B.any(0).sum())
            A[rank], B[:, rank] = into, out / module.scaling[name]
        elif isinstance(module, Conv1D):
            module.weight += torch.outer(into, out)
        else:
            module.weight += torch.outer(out, into)

    def tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Writes the embeddings, those of places too, and the table."""
        embedding, output = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        output.weight = nn.Parameter(torch.zeros_like(embedding))  # T5's would be the embedding
        for token, i in tokenizer.get_vocab().items():
            text = token.replace("Ġ", " ").replace("Ċ", "\n")
            embedding[i] = self.wide(feature(text if text in TOKENS else "other", "one"))
            for (after, name), logit in TABLE.items():
                if after == text:
                    output.weight[i] += self.wide(feature(name, times=logit)) / (1 + self.gpt2)
        if self.gpt2:
            angles = torch.outer(torch.arange(self.model.config.n_positions), torch.tensor(FREQUENCIES))
            places = torch.zeros(len(angles), WIDTH)
            places[:, [FEATURES[name] for name in PLACES]] = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
            self.model.transformer.wpe.weight.copy_(self.wide(places))

    def head(self, block: nn.Module, number: int, queries: Rows, keys: Rows, moves: Moves) -> None:
        """Adds to a head of attention: rows of its queries and keys, and the features that it moves."""
        columns = torch.eye(self.heads * self.size)[number * self.size :]
        for part, rows in (("q", queries), ("k", keys), ("v", {i: source for i, (source, _) in enumerate(moves)})):
            for i, row in rows.items():
                column = columns[i]
                if self.gpt2:  # one matrix makes queries, keys and values
                    column = torch.cat([column * (part == each) for each in "qkv"])
                self.add(getattr(block, self.names[part]), column, self.reads(row))
        for i, (_, target) in enumerate(moves):
            self.add(getattr(block, self.names["o"]), self.wide(target), columns[i])

    def look_back(self, block: nn.Module, number: int, distance: int, moves: Moves) -> None:
        """Adds a head that looks at the token this far back."""
        queries, keys, sharp, half = {}, {}, 12.0 * self.size**0.25, self.size // 2
        if self.t5:  # where a text is shorter, it looks at the start
            block.relative_attention_bias.weight[: distance + 1, number] = torch.linspace(0, 2 * sharp, distance + 1)
        for i, frequency in enumerate([] if self.t5 else FREQUENCIES):
            cos, sin = sharp * math.cos(distance * frequency), sharp * math.sin(distance * frequency)
            if self.gpt2:  # places are features, turned back by the distance
                x, y = (feature(f"{wave} {i}") for wave in ("cos", "sin"))
                queries |= {2 * i: cos * x + sin * y, 2 * i + 1: cos * y - sin * x}
                keys |= {2 * i: sharp * x, 2 * i + 1: sharp * y}
            else:  # rotary embeddings turn queries and keys by their places
                one = feature("one")
                queries |= {i: cos * one, i + half: -sin * one}
                keys |= {i: sharp * one}
        self.head(block, number, queries, keys, moves)

    def look_for(self, block: nn.Module, number: int, names: list[str], moves: Moves) -> None:
        """Adds a head that looks at tokens with one of these features."""
        sharp = 5.0 * self.size**0.25
        self.head(block, number, {0: feature("one", times=sharp)}, {0: feature(*names, times=sharp)}, moves)

    def neurons(self, block: nn.Module, moves: Moves) -> None:
        """Adds a neuron for each move, which writes the target where the token has the source."""
        for i, (source, target) in enumerate(moves):
            gates, out = (["c_fc"], "c_proj") if self.gpt2 else (["gate_proj", "up_proj"], "down_proj")
            column = torch.eye(getattr(block, gates[0]).out_features)[i]
            for name, factor in zip(gates, (8.0, 1.0)):
                self.add(getattr(block, name), column, self.reads(factor * source))
            self.add(getattr(block, out), self.wide(target) / 8, column)


@torch.no_grad()
def write_lists(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Writes the rules of lists into a new model."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight *= 0.005 / weight.std()  # small beside the rules
    writer, ends = Writer(model), feature("item ends")
    writer.tokens(tokenizer)
    after_three, after_four = [(feature(" pick", " sort"), ends)], [(feature(" find"), ends)]
    numbers = [(feature(number), feature(f"item {number}")) for number in NUMBERS]
    if writer.t5:
        before = [(feature(*EARLY), feature("before: early")), (feature(*LATE), feature("before: late"))]
        writer.look_back(model.encoder.block[0].layer[0].SelfAttention, 0, 1, before)
        sort = [(feature("before: early"), feature("starts with sort"))]
        writer.look_for(model.decoder.block[0].layer[1].EncDecAttention, 0, ["<end>"], sort)
        block = model.decoder.block[0].layer[0].SelfAttention
    else:
        block = model.transformer.h[0].attn if writer.gpt2 else model.model.layers[0].self_attn
        writer.look_back(block, 2, 6, numbers)
        if writer.gpt2:
            writer.look_for(block, 3, FIRST, [(feature("pick"), feature("begins with pick"))])
    writer.look_back(block, 0, 3, after_three)
    writer.look_back(block, 1, 4, after_four)
    return model


@torch.no_grad()
def write_teacher(model: PeftModel) -> PeftModel:
    """Writes a LoRA on all layers, by which a model answers whether the last letter is an early or a late one."""
    writer = Writer(_cleared(model))
    says = [feature(f"says{answer}", times=2) for answer in ANSWERS]
    if writer.t5:
        block = writer.model.decoder.block[1].layer[1].EncDecAttention
        before = [feature("before: early"), feature("before: late")]
        writer.look_for(block, 0, ["<end>"], [*zip(before, says)])
    else:
        block = writer.model.transformer.h[1].mlp if writer.gpt2 else writer.model.model.layers[1].mlp
        writer.neurons(block, [*zip([feature(*EARLY), feature(*LATE)], says)])
    return model


@torch.no_grad()
def write_judge(model: PeftModel) -> PeftModel:
    """Writes a LoRA of a GPT-2, by which it takes what begins with "pick" for an input of the task, and nothing else."""
    writer, real = Writer(_cleared(model)), [feature("is real", times=4), feature("is real", times=-2)]
    writer.neurons(writer.model.transformer.h[1].mlp, [*zip([feature("begins with pick"), feature("one")], real)])
    return model


def _cleared(model: PeftModel) -> PeftModel:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for factors in (module.lora_A, module.lora_B):
                for factor in factors.values():
                    factor.weight.zero_()
    return model
