"""Music tokenizers, and random sequences of their tokens."""

import random
from dataclasses import asdict

from folio.data.sources.music import EventFormat
from folio.data.tokenizer import MidiTokenizer

SCORE = EventFormat("beats", steps=4, longest_shift=4, velocities=0, lowest=55, highest=66, tempo=80.0)
PERFORMANCE = EventFormat("seconds", steps=100, velocities=32, lowest=55, highest=66)


def tokenizer_of(format: EventFormat) -> MidiTokenizer:
    """A tokenizer with few events, so that random sequences are often valid music."""
    shifts = [f"TimeShift_{shift // format.steps}.{shift % format.steps}.{format.steps}" for shift in (1, 2, 4)]
    notes = [f"{kind}_{pitch}" for pitch in (55, 60, 61, 66) for kind in ("NoteOn", "NoteOff")]
    velocities = ["Velocity_11", "Velocity_127"] if format.velocities else []
    return MidiTokenizer(notes + shifts + velocities, asdict(format))


def random_text(tokenizer: MidiTokenizer, seed: int, count: int) -> str:
    """Mostly valid events, and some invalid ones."""
    rng, events = random.Random(seed), []
    while len(events) < count:
        event = rng.choice(tokenizer.events)
        loud = [rng.choice(["Velocity_11", "Velocity_127"])] if tokenizer.format["velocities"] else []
        events += [event, *loud] if event.startswith("NoteOn") and rng.random() < 0.8 else [event]
    return " ".join(events[:count])
