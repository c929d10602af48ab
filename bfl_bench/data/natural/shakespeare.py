"""The next character in what a role of a play says: a client per role."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from bfl_bench.checks import AtLeast, Between
from bfl_bench.data.dataset import Dataset
from bfl_bench.data.natural.owning import assemble, choose, count_test
from bfl_bench.data.natural.plays import read_roles
from bfl_bench.data.sources import load_content
from bfl_bench.errors import ConfigError

CHARACTERS = (  # token 1 is the first one; token 0 stands for any other character
    "\n !\"#$%&'()*,-./0123456789:;?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz"
)
VOCABULARY_SIZE = 1 + len(CHARACTERS)


@dataclass(frozen=True)
class Shakespeare:
    """Sequences of tokens (n, length), and as labels the token that follows each of them (n, length).

    The vocabulary is that of TensorFlow Federated's tutorial, 86 characters, but for the carriage return: no text
    here has one, and its place is taken by the token for unknown characters.
    """

    name: str
    sequence_length: Annotated[int, AtLeast(1)]
    min_sequences: Annotated[int, AtLeast(2)]
    num_roles: Annotated[int, AtLeast(1)] | None
    test_fraction: Annotated[float, Between(0.01, 0.99)]
    split_seed: Annotated[int, AtLeast(0)]

    def load(self, data_dir: Path) -> Dataset:
        texts: dict[str, str] = load_content("shakespeare", data_dir)
        sequences = {
            f"{play}: {role}": cut_sequences(encode(speech), self.sequence_length)
            for play, text in texts.items()
            for role, speech in read_roles(text).items()
        }
        roles = sorted(name for name, cut in sequences.items() if len(cut) >= self.min_sequences)
        if not roles:
            raise ConfigError("min_sequences", self.min_sequences, "less: no role has so many")
        chosen = choose(roles, self.num_roles, "num_roles", self.split_seed, "shakespeare")
        sizes = [len(sequences[name]) for name in chosen]
        tokens = torch.from_numpy(np.concatenate([sequences[name] for name in chosen]))
        in_test = np.concatenate([np.arange(size) >= size - count_test(size, self.test_fraction) for size in sizes])
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return assemble(x, y, np.repeat(chosen, sizes), in_test, VOCABULARY_SIZE)


def encode(text: str) -> NDArray[np.int64]:
    """A token per character."""
    tokens = {character: token for token, character in enumerate(CHARACTERS, start=1)}
    return np.array([tokens.get(character, 0) for character in text], np.int64)


def cut_sequences(tokens: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Whole sequences with the token after each, (n, length + 1); what is left at the end is dropped."""
    count = max(0, (len(tokens) - 1) // length)
    return np.take(tokens, np.arange(count)[:, None] * length + np.arange(length + 1))
