"""Pickles that would exhaust memory or time are rejected before they are loaded."""

import io
import re
import struct
import zipfile

import pytest
import torch

from folio import UserError
from folio.base import pickles
from folio.checkpoints import foreign

pytestmark = pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")


def text(value: str) -> bytes:
    """The opcode of a string."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def nested_pairs(empty: bytes) -> bytes:
    """A list, b"]", or tuple, b")", whose two items are the same list or tuple, and so on for 60 levels."""
    content = empty + b"q\x00"
    for i in range(60):
        value = content + b"h" + bytes([i])
        content = (b"](" + value + b"e" if empty == b"]" else value + b"\x86") + b"q" + bytes([i + 1])
    return content


HUGE_STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"J\xff\xff\xff\x7ftQ"
HOSTILE_PICKLES = {
    "a bytearray of 3 GB": (b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R", "it uses 'builtins bytearray'"),
    "lists that double": (nested_pairs(b"]"), "too many values"),
    "a key that is a nested tuple": (b"}" + nested_pairs(b")") + b"K\x01s", "not a string or a number"),
    "the same in a mark": (b"}(" + nested_pairs(b")") + b"K\x01u", "not a string or a number"),
    "an OrderedDict of such items": (
        b"ccollections\nOrderedDict\n](" + nested_pairs(b")") + b"K\x01\x86e\x85R",
        "OrderedDict from items",
    ),
    "a deep list": (b"]" * 1000 + b"a" * 999, "nested too deeply"),
    "a list that contains itself": (b"]q\x00h\x00a", "a value contains itself"),
    "a memo of 2**31 entries": (b"}r\xff\xff\xff\x7f", "LONG_BINPUT with the index 2,147,483,647"),
    "a memo with a gap": (b"}q\x09", "BINPUT with the index 9"),
    "a storage larger than the file": (b"]" + HUGE_STORAGE + b"a", "its tensors are larger than the file"),
    "an opcode that torch.save does not write": (b"\x8f", "it uses EMPTY_SET"),
    "a stack that is empty": (b"]aaa", "it is damaged"),
    "two million values": (b"](" + b"N" * 2**21 + b"e", "more than 1,048,576 opcodes"),
}


@pytest.mark.parametrize("case", HOSTILE_PICKLES)
def test_a_hostile_pickle_is_rejected_before_torch_loads_it(case, tmp_path, monkeypatch):
    """torch's unpickler, although it runs no code, allocated gigabytes for such a file or never returned: hashing a
    key or printing a value takes 2**60 steps.
    """
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    content, message = HOSTILE_PICKLES[case]
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
    with pytest.raises(UserError, match=rf"ckpt\.pt .*\(.*{re.escape(message)}.*\); download it again"):
        foreign.load(str(tmp_path / "ckpt.pt"))


def test_a_shared_list_in_a_pickle_is_read_once(monkeypatch):
    """A list with n references to another one was read n times: minutes for a file of 2 MB."""
    n, reads, iterate = 500, [], pickles.PickledValues.__iter__
    monkeypatch.setattr(pickles.PickledValues, "__iter__", lambda values: reads.append(len(values)) or iterate(values))
    inner = b"](" + b"K\x01" * n + b"eq\x00"
    content = b"\x80\x02](" + inner + b"h\x00" * (n - 1) + b"e."
    assert len(pickles.check(io.BytesIO(content)).value) == n
    assert sum(reads) < 10 * n
