"""UniMedProcessor: prompts, images and answers in, tensors out; what is wrong with a sample is said of that sample."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_uni_med import (
    HEIGHT,
    IMAGE_TOKEN_ID,
    TOKENS,
    WIDTH,
    batch,
    build_tokenizer,
    image,
    image_processor,
    processor,
    rows,
    save_parts,
    uni_med,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_ext import UniMedProcessor


def text_of(make, ids) -> str:
    return make.tokenizer.decode([i for i in ids if i != make.image_token_id])


def test_the_prompt_is_the_papers():
    make = processor()
    inputs = make(images=image(), text="how many cells are there ?", task="vqa", return_tensors="pt")
    (ids,) = inputs["input_ids"].tolist()
    assert ids.count(make.image_token_id) == TOKENS and make.image_token_id == IMAGE_TOKEN_ID
    start = ids.index(make.image_token_id)
    assert ids[start : start + TOKENS] == [make.image_token_id] * TOKENS
    assert text_of(make, ids) == "[INST] <Img> </Img> [vqa] how many cells are there ? [/INST]"
    assert text_of(make, make(text="is this a cell ?", task="qa")["input_ids"][0]) == "[INST] is this a cell ? [/INST]"
    assert inputs["pixel_values"].shape == (1, 3, HEIGHT, WIDTH) and inputs["image_tasks"].tolist() == [0]


def test_a_batch_mixes_tasks_and_rows_without_images():
    inputs = batch(answers=False)
    assert inputs["image_tasks"].tolist() == [0, 4, 3] and len(inputs["pixel_values"]) == 3
    assert (inputs["input_ids"] == IMAGE_TOKEN_ID).sum(1).tolist() == [TOKENS, 0, TOKENS, TOKENS]
    assert set(batch(samples=rows()[1:2])) == {"input_ids", "attention_mask", "labels"}


def test_padding_is_left_to_generate_and_right_to_train():
    make = processor()
    plain, trained = batch(answers=False), batch()
    assert plain["attention_mask"][1, 0] == 0 and plain["attention_mask"][:, -1].all()
    assert trained["attention_mask"][1, -1] == 0 and trained["attention_mask"][:, 0].all()
    left = make(text=["is this", "is this a cell"], task="qa", answers=["yes", "no"], padding_side="left", return_tensors="pt")
    assert left["labels"].tolist() == [[-100] * 6 + left["input_ids"][0, -2:].tolist(),
                                       [-100] * 6 + left["input_ids"][1, -2:].tolist()]  # fmt: skip
    ragged = make(text=["is this", "is this a cell"], task="qa", padding=False)
    assert [len(row) for row in ragged["input_ids"]] == [4, 6]
    full = make(text="is this", task="qa", padding="max_length", max_length=12, return_tensors="pt")
    assert full["input_ids"].shape == (1, 12)


def test_labels_are_the_answer_and_its_end():
    make = processor()
    labels = batch()["labels"]
    assert [text_of(make, row[row >= 0]) for row in labels] == [row["answer"] + " </s>" for row in rows()]
    prompt = make(text="is this", task="qa")["input_ids"][0]
    assert make(text="is this", task="qa", answers="yes")["input_ids"][0][: len(prompt)] == prompt


def bpe(ending: bool) -> PreTrainedTokenizerFast:
    """Words with their space before them, as GPT-2's; texts get a start, and an end if asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["what is a red cell ? the red cell is a platelet"] * 3
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=400))
    ends = " </s>" if ending else ""
    tokenizer.post_processor = processors.TemplateProcessing(f"<s> $A{ends}", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("ending", [False, True])
def test_training_chat_and_asking_have_the_same_tokens(ending):
    make = UniMedProcessor(image_processor(), bpe(ending), num_image_tokens=TOKENS)
    ask = {"images": image(), "text": "what is a red cell ?", "task": "vqa"}
    trained = make(**ask, answers="the red cell")
    prompt = make(**ask)["input_ids"][0]
    ids, labels = trained["input_ids"][0], trained["labels"][0]
    assert ids[: len(prompt)] == prompt and ids.count(1) == 1 and ids[-1] == 1
    assert make.decode([i for i in labels if i >= 0]) == " the red cell</s>"
    part = {"type": "image", "image": image()}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": ask["text"]}]}]
    chat.append({"role": "assistant", "content": "the red cell"})
    assert make.apply_chat_template(chat, task="vqa", tokenize=True, return_dict=True)["input_ids"][0] == ids


def test_images_come_in_many_forms(tmp_path):
    make = processor()
    expected = make(images=image(), text="what ?", task="cls", return_tensors="pt")["pixel_values"]
    image().save(tmp_path / "image.png")
    array = np.asarray(image())
    for form in (tmp_path / "image.png", str(tmp_path / "image.png"), array, torch.tensor(array).permute(2, 0, 1), [image()]):
        pixels = make(images=form, text="what ?", task="cls", return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(pixels, expected)


def test_whole_prompts_say_their_task_themselves():
    make = processor()
    by_task = make(images=image(), text="what ?", task="cls", return_tensors="pt")
    written = make(images=image(), text="[INST] <Img><image></Img> [cls] what ? [/INST]", return_tensors="pt")
    for name in by_task:
        assert torch.equal(by_task[name], written[name]), name
    prompts = ["[vqa] <image> <image> one", "two", "[cls] <image> three"]
    flat = make(images=[image(i) for i in range(3)], text=prompts, return_tensors="pt")
    assert flat["image_tasks"].tolist() == [0, 0, 4]
    nested = make(images=[[image(0), image(1)], None, image(2)], text=prompts, return_tensors="pt")
    assert torch.equal(flat["pixel_values"], nested["pixel_values"])
    assert "image_tasks" not in make(images=image(), text="<image> what ?")


def test_the_chat_template_writes_the_same_prompt():
    make = processor()
    part = {"type": "image", "image": image()}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "what ?"}]}]
    by_chat = make.apply_chat_template(chat, task="cls", tokenize=True, return_dict=True, return_tensors="pt")
    expected = make(images=image(), text="what ?", task="cls", return_tensors="pt")
    for name in expected:
        assert torch.equal(by_chat[name], expected[name]), name
    chat += [{"role": "assistant", "content": [{"type": "text", "text": "a cell"}]}, {"role": "user", "content": "where ?"}]
    text = make.apply_chat_template(chat, task="cls")
    assert text == "[INST] <Img><image></Img> [cls] what ? [/INST] a cell</s>[INST] where ? [/INST]"
    system = {"role": "system", "content": "be brief ."}
    late = [system, {"role": "user", "content": "what ?"}, {"role": "assistant", "content": "a cell"}, chat[0]]
    text = make.apply_chat_template(late, task="cls")
    assert text == "[INST] be brief . what ? [/INST] a cell</s>[INST] <Img><image></Img> [cls] what ? [/INST]"
    alone = make.apply_chat_template([{"role": "user", "content": "is this a cell ?"}], task="qa")
    assert alone == "[INST] is this a cell ? [/INST]"


def test_a_processor_is_saved_and_loaded(tmp_path):
    processor(tasks=["vqa", "cls"]).save_pretrained(tmp_path)
    loaded = UniMedProcessor.from_pretrained(tmp_path)
    assert (loaded.num_image_tokens, loaded.tasks, loaded.image_token_id) == (TOKENS, ["vqa", "cls"], IMAGE_TOKEN_ID)
    assert loaded(images=image(), text="what ?", task="cls")["image_tasks"] == [1]
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<image>") == IMAGE_TOKEN_ID
    vision, text = save_parts(tmp_path / "parts")
    assert UniMedProcessor.from_vision_text_pretrained(vision, text).num_image_tokens == TOKENS
    model = uni_med(tasks=["cls", "vqa"], resampling_rate=2)
    counted = UniMedProcessor.from_vision_text_pretrained(vision, text, model)
    assert (counted.num_image_tokens, counted.tasks) == (2 * TOKENS, ["cls", "vqa"])


def test_a_tokenizer_gets_only_missing_tokens():
    tokenizer = build_tokenizer(pad_token="w0")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    size = len(tokenizer)
    make = UniMedProcessor(image_processor(), tokenizer, num_image_tokens=TOKENS)
    assert len(tokenizer) == size and tokenizer.pad_token == "w0"
    assert processor().tokenizer.pad_token == "</s>" and make.model_input_names[-1] == "image_tasks"


def broken(tmp_path) -> Image.Image:
    path = tmp_path / "broken.jpg"
    image().save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    return Image.open(path)


def test_an_image_token_in_the_vocabulary_is_not_split():
    tokenizer = Tokenizer(models.WordLevel({"<image>": 0, "</s>": 1, "<unk>": 2, "what": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make = UniMedProcessor(
        image_processor(), PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), num_image_tokens=TOKENS
    )
    assert make(images=image(), text="what", task="vqa")["input_ids"][0].count(0) == TOKENS


def test_a_tokenizer_without_an_end_is_an_error():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    for missing in (tokenizer, None):
        with pytest.raises(ValueError, match="with an end token"):
            UniMedProcessor(image_processor(), missing)


def test_images_that_are_broken_or_not_rgb_are_errors(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    Image.new("L", (9, 9)).save(tmp_path / "gray.png")
    cases = [(broken(tmp_path), "is broken"), (7, "is a int"), (str(tmp_path / "gray.png"), "has mode L, not RGB")]
    cases += [(Image.new(mode, (9, 9)), f"has mode {mode}, not RGB; convert") for mode in ("RGBA", "CMYK", "P", "I;16")]
    cases += [(str(tmp_path / path), rf".*{path} cannot be read") for path in ("text.png", "missing.png")]
    cases += [(np.zeros(shape, np.uint8), "has shape") for shape in ((9, 9), (9, 9, 1), (4, 9, 9), (1, 3, 9, 9))]
    for picture, message in cases:
        with pytest.raises(ValueError, match=f"Sample 1: the image {message}"):
            processor()(images=[None, picture], text=["is", "what ?"], task=["qa", "cls"])


@pytest.mark.parametrize(("call", "message"), [
    ({"text": ["is", "what ?"], "task": ["qa", "clss"]}, "Sample 1: there is no task 'clss'; they are vqa, refer"),
    ({"text": "[cls] what ?", "task": "vqa", "images": image()}, r"the task token \[cls\]. Leave it out; task='vqa'"),
    ({"text": ["what ?"] * 2, "task": "cls", "images": [1]}, "There are 1 images for 2 texts"),
    ({"text": ["what ?"] * 2, "task": "cls", "images": [image(), None]}, "Sample 1: the task 'cls' needs an image"),
    ({"text": ["what ?"] * 2, "task": "qa", "images": [None, image()]}, "Sample 1: the task 'qa' is without images"),
    ({"text": "what ?", "images": image()}, "Sample 0: 1 images, but <image> occurs 0 times in the text"),
    ({"text": ["<image>", "<image> <image>"], "images": [image()] * 2}, r"2 images, but <image> occurs 3 times .*\[1, 2\]"),
    ({"text": ["<image>", "<image> <image>"], "images": [[image()], [image()]]}, "Sample 1: 1 images, but <image>"),
    ({"text": "<image> what ?", "images": image(), "task": "vqa"}, "Sample 0: with task=, images take their place by"),
    ({"text": ["[cls] <image>", "<image>"], "images": [image()] * 2}, "Some samples with images have a task"),
    ({"text": ["is", "is " * 63], "task": "qa"}, "Sample 1: 65 tokens, but the context has 64"),
    ({"text": ["is", "is this"], "task": "qa", "max_length": 3}, "Sample 1: 4 tokens, but the context has 3"),
    ({"text": ["is", "is"], "task": "qa", "answers": ["yes"]}, "There are 1 answers for 2 texts"),
    ({"text": ["is", "is"], "task": ["qa"]}, "There are 1 tasks for 2 texts"),
    ({"text": ["is", 3], "task": "qa"}, "Sample 1: the text is a int"),
    ({"text": "is", "task": "qa", "truncation": True}, "truncation=True is not supported"),
    ({"images": image()}, "There is no text"),
    ({"text": []}, "There are no texts"),
    ({"text": ["is", "is"], "task": "qa", "answers": ["yes", None]}, "Sample 1: the answer is None"),
    ({"text": ["is", "is"], "task": "qa", "answers": ["yes", "<image>"]}, "Sample 1: the answer is '<image>', not a text"),
    ({"text": "is", "task": "cls", "images": np.zeros((9, 9, 3), "float32")}, "Sample 0: the image is an array of float32"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_invalid_samples_are_errors_that_name_the_sample(call, message):
    with pytest.raises(ValueError, match=message):
        processor()(**call)
