import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from folio import UserError, load
from folio.base.files import read_json, write_json
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import write_gguf, write_tokenizer
from folio.data.shards import Dataset, DatasetError, open_dataset
from folio.data.sources.pairs import split_pairs, write_pairs
from folio.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from folio.data.windows import Mixture
from folio.decoding.language_model import LanguageModel
from folio.decoding.prompts import encode_prompt
from folio.web.chat import chat_prompt
from prepare import pairs, summaries
from prepare.pairs import PairsConfig
from tests.support.decoding import random_model
from tests.support.tiny_tokenizers import trained
from tests.support.viewed_models import save_random_run
from train import train

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who\nare you?"},
    {"role": "assistant", "content": "Me."},
    {"role": "user", "content": "And I?"},
    {"role": "assistant", "content": "You."},
]
QUESTIONS = ["Who\nare you?", *(f"Who are {k}?" for k in range(1, 30))]  # different: chats are split by the first one
CHATS = [
    {"messages": [CHAT[0], CHAT[1] | {"content": first}, CHAT[2], CHAT[3] | {"content": f"{k} + 0?"}, CHAT[4]]}
    for k, first in enumerate(QUESTIONS)
]
PAIRS = [{"prompt": f"{k} + 0 =", "completion": f" {k}"} for k in range(60)]
CHARACTERS = "".join(sorted({*json.dumps([CHATS, PAIRS]), *"\nUser:Assistant:System:Romeo"}))


def prepare(folder: Path, name: str, lines: list, tokenizer: str = "byte") -> Dataset:
    """Prepare lines as a data set."""
    write_pairs(folder / f"{name}.jsonl", lines)
    cfg = PairsConfig(inputs=(str(folder / f"{name}.jsonl"),), tokenizer=tokenizer, data_dir=str(folder))
    pairs.main(cfg)
    return open_dataset(folder / name)


@pytest.fixture
def train_on(tiny, tmp_path):
    """Return a function that trains a tiny model on data sets and loads its checkpoint."""

    def run(dataset: str, name: str = "out", **settings):
        out_dir = str(tmp_path / name)
        settings = dict(max_iters=2, eval_interval=2, warmup_iters=0, eval_iters=1) | settings
        train(tiny(dataset=dataset, data_dir=str(tmp_path), out_dir=out_dir, **settings))
        return load(out_dir)

    return run


# --- from JSON lines to a template ------------------------------------------------------------------------------------


def test_chat_prompts_equal_the_training_prompts(train_on, tmp_path):
    dataset = prepare(tmp_path, "chats", CHATS)
    prompt_format = train_on("chats").prompt_format
    assert prompt_format == "chat"
    prompts = {prompt for shards in (dataset.train, dataset.val) for prompt, _ in split_pairs(shards, ByteTokenizer())}
    first = "System: Be short.\n\nUser: Who\nare you?\n\nAssistant:"
    assert chat_prompt("chat", CHAT[:2]) == first and first in prompts
    assert chat_prompt("chat", CHAT[:4]) == f"{first} Me.<|endoftext|>User: And I?\n\nAssistant:"
    chat = CHATS[QUESTIONS.index(CHAT[1]["content"])]["messages"]
    assert chat_prompt("chat", chat[:4]) in prompts


def test_prompts_have_the_same_tokens_as_in_training(tmp_path):
    """The blank line before "Assistant:" was one token in training, and two in the same text as a prompt."""
    tokenizer = BPETokenizer.train(["Who?\n\n"] * 9 + ["Assistant: You. And"] * 9, 300)
    assert len(tokenizer.encode("\n\n")) == 1 and len(tokenizer.encode("\n\nA")) == 3
    write_json(tmp_path / "tokenizer.json", tokenizer.to_json())
    dataset = prepare(tmp_path, "chats", CHATS, str(tmp_path / "tokenizer.json"))
    ids = [i for shard in (*dataset.train, *dataset.val) for i in shard.ids.tolist()]
    for k in range(30):
        prompt = chat_prompt("chat", CHATS[k]["messages"][:-1])
        expected = encode_prompt(tokenizer, prompt).ids
        assert any(ids[n : n + len(expected)] == expected for n in range(len(ids)))


def test_pairs_take_one_unchanged_prompt(train_on, tmp_path):
    prepare(tmp_path, "sums", PAIRS)
    assert train_on("sums").prompt_format == "pairs"
    assert chat_prompt("pairs", [{"role": "user", "content": "1 + 0 ="}]) == "1 + 0 ="
    with pytest.raises(UserError, match=r"messages .*send only the last"):
        chat_prompt("pairs", [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 0 ="}])
    with pytest.raises(UserError, match=r'messages\[0\].role must be "user"'):
        chat_prompt("pairs", [{"role": "system", "content": "Add."}])


def test_summaries_are_pairs_and_documents_are_text(tmp_path):
    lines = [{"document": f"Document {k}. It is long.", "summary": f"Document {k}."} for k in range(40)]
    write_pairs(tmp_path / "texts.jsonl", lines)
    cfg = summaries.SummariesConfig(inputs=(str(tmp_path / "texts.jsonl"),), data_dir=str(tmp_path), tokenizer="byte")
    for name, pretraining, expected in (("texts", False, "pairs"), ("texts-documents", True, None)):
        summaries.main(cfg.replace(pretraining=pretraining))
        assert open_dataset(tmp_path / name).prompt_format == expected


# --- other data sets and checkpoints ----------------------------------------------------------------------------------


def test_the_format_of_a_mixture(train_on, data_dir, tmp_path):
    chats, sums = prepare(tmp_path, "chats", CHATS), prepare(tmp_path, "sums", PAIRS)
    both, text = prepare(tmp_path, "both", [*PAIRS, *CHATS]), open_dataset(data_dir / "verse")
    for datasets, expected in (
        ([text], None),
        ([chats], "chat"),
        ([sums], "pairs"),
        ([both], "chat"),
        ([chats, sums], "chat"),
        ([sums, chats], "chat"),
    ):
        mixture = Mixture([(dataset, 1.0) for dataset in datasets], 8, 1337, "epoch")
        assert mixture.prompt_format == expected
    assert train_on("chats:0.3,sums:0.7").prompt_format == "chat"


def test_the_latest_training_determines_the_format(train_on, tmp_path, data_dir):
    write_json(tmp_path / "tokenizer.json", CharTokenizer(CHARACTERS).to_json())
    prepare(tmp_path, "chats", CHATS, str(tmp_path / "tokenizer.json"))
    text = [{"prompt": "", "completion": json.dumps(chat)} for chat in CHATS]
    prepare(tmp_path, "text", text, str(tmp_path / "tokenizer.json"))
    meta = read_json(tmp_path / "text" / "meta.json")
    assert meta["prompt_format"] == "pairs"
    write_json(tmp_path / "text" / "meta.json", meta | {"prompt_format": None})
    assert open_dataset(tmp_path / "text").prompt_format is None
    prompt_format = train_on("chats").prompt_format
    assert prompt_format == "chat"
    assert train_on("chats", init_from="resume", max_iters=4).prompt_format == "chat"
    assert train_on("text", "fine", init_from=str(tmp_path / "out")).prompt_format is None
    assert train_on("chats", "back", init_from=str(tmp_path / "fine")).prompt_format == "chat"


def test_a_model_of_another_program_has_no_template(tmp_path):
    model = save_random_run(tmp_path, ByteTokenizer(), seed=1)
    assert Checkpoint(tmp_path, {}, ByteTokenizer(), {"model": {}}).prompt_format is None
    assert LanguageModel(model, ByteTokenizer()).prompt_format is None


def test_unknown_formats_in_a_data_set_are_refused(tmp_path):
    meta = tmp_path / "sums" / "meta.json"
    prepare(tmp_path, "sums", PAIRS)
    for value in ("other", ["chat"], 5):
        write_json(meta, read_json(meta) | {"prompt_format": value})
        with pytest.raises(DatasetError, match=r"not a valid meta.json of Folio .*prompt_format is"):
            open_dataset(tmp_path / "sums")


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.needs("gguf", "transformers")
@pytest.mark.parametrize("prompt_format, count", [("chat", 2), ("chat", 4), ("pairs", 1)])
def test_exports_contain_the_chat_template(prompt_format, count, tmp_path):
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer = trained()
    model = random_model(1, vocab_size=tokenizer.vocab_size, block_size=64).requires_grad_(False)
    state = {"model": asdict(model.config), "dataset": {"prompt_format": prompt_format}}
    loaded = Checkpoint(tmp_path, dict(model.named_parameters()), tokenizer, state)
    write_tokenizer(loaded, tmp_path / "hf")
    messages = [{"role": "developer", "content": "Hi."}, *CHAT[1:4]][:count] if count > 1 else CHAT[1:2]
    expected = chat_prompt(prompt_format, messages)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    assert theirs(expected).input_ids == encode_prompt(tokenizer, expected).ids
    write_gguf(loaded, tmp_path / "model.gguf")
    assert GGUFReader(tmp_path / "model.gguf").fields["tokenizer.chat_template"].contents() == theirs.chat_template
    write_tokenizer(replace(loaded, state={"model": state["model"]}), tmp_path / "text")
    assert AutoTokenizer.from_pretrained(tmp_path / "text").chat_template is None


# --- messages ---------------------------------------------------------------------------------------------------------

HELLO = {"role": "user", "content": "Hello"}


def test_content_parts_and_the_developer_role():
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    expected = "System: Be kind.\n\nUser: Hello\nthere\n\nAssistant:"
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": parts, "name": "Ann"}]
        assert chat_prompt("chat", messages) == expected
        assert messages[1]["content"] == parts


def test_an_answer_of_the_server_can_be_sent_back():
    """With the fields that OpenAI's client adds to it, and with the same name for each message of a role."""
    answer = {"role": "assistant", "content": "Hi.", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [HELLO | {"name": "Ann"}, answer | {"name": "bot"}, HELLO | {"name": "Ann"}]
    prompt = chat_prompt("chat", messages)
    assert prompt == "User: Hello\n\nAssistant: Hi.<|endoftext|>User: Hello\n\nAssistant:"


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], "messages must be a list"),
        (["Hello"], r"messages\[0\] must be"),
        ([HELLO, {"content": "x"}], r"messages\[1\].role must be one of system, developer, user, assistant"),
        ([{"role": "tool", "content": "5", "tool_call_id": "a"}], r"messages\[0\].role must be one of"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content must be a string"),
        ([HELLO | {"content": ["x"]}], r"messages\[0\].content may only contain parts"),
        ([HELLO | {"content": [{"type": "text", "text": 1}]}], "may only contain parts"),
        ([HELLO | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "may only contain parts"),
        ([HELLO | {"content": "<|endoftext|>"}], r"messages\[0\].content must not contain <\|endoftext\|>"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}], r"messages\[0\].tool_calls is not"),
        ([HELLO, {"role": "assistant", "content": "He", "prefix": True}], r"messages\[1\].prefix is not supported"),
        ([HELLO | {"name": "Ann"}, HELLO, HELLO | {"name": "Bob"}], r"messages\[2\].name differs .*content"),
    ],
)
@pytest.mark.parametrize("prompt_format", ["chat", "pairs"])
def test_invalid_messages_are_refused(messages, error, prompt_format):
    with pytest.raises(UserError, match=error):
        chat_prompt(prompt_format, messages)
