# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""A byte-level tokenizer of any vocabulary size, made on the spot.

It encodes every text and decodes it again; its merges are invented syllables, so that what a random
model says can be read aloud. It is not Kimi-K3's tokenizer, and its chat template only has that
model's markers in common with it.
"""

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

from k3_checkpoint.spec import special_token_ids

_CONSONANTS = "bdfghjklmnprstvwz"
_VOWELS = "aeiou"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|open|>{{ message['role'] }}<|sep|>{{ message['content'] }}"
    "<|close|>{{ message['role'] }}<|sep|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        folder: exists.
        vocab_size: of the model; the tokenizer has exactly as many entries.

    Raises:
        ValueError: no room for 256 bytes and the special tokens.

    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = special_token_ids(vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(special) - len(alphabet)
    if room < 0:
        raise ValueError(
            f"vocab_size: expected at least {len(special) + len(alphabet)} for all bytes and the "
            f"special tokens, found {vocab_size}"
        )
    merges = list(islice(_merges(), room))
    if len(merges) < room:
        raise ValueError(
            f"vocab_size: at most {vocab_size - room + len(merges)} entries, found {vocab_size}"
        )
    entries = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "model_max_length": 1048576,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": special["[BOS]"], "eos_token_id": special["[EOS]"]},
    )


def _merges() -> Iterator[tuple[str, str]]:
    """Syllables, words of two and words of three, in the order in which BPE may build them."""
    syllables = ["".join(pair) for pair in product(_CONSONANTS, _VOWELS)]
    yield from product(_CONSONANTS, _VOWELS)
    pairs = list(product(syllables, syllables))
    yield from pairs
    for (first, second), third in product(pairs, syllables):
        yield first + second, third


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
