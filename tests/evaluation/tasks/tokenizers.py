"""A tokenizer small enough for tests: no vocabulary, nothing lost."""

import re
from collections.abc import Sequence

BOS = 0


class Pieces:
    """Pieces of up to four letters, three digits, or one other character, with a space before them if there is one."""

    def __init__(self) -> None:
        self.pieces = ["<s>"]
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        for piece in re.findall(r" ?(?:[A-Za-z]{1,4}|[0-9]{1,3}|[^A-Za-z0-9])| ", text, re.DOTALL):
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece)
            ids.append(self.ids[piece])
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.pieces[token] for token in token_ids if token != BOS or not skip_special_tokens)
