"""A long answer in steps, each of which needs one line of the prompt and the step before."""

import random
import re

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register

_GOODS = """
apple banana cherry date fig grape lemon lime mango melon olive orange papaya peach pear plum quince raspberry
tomato onion carrot potato pepper garlic spinach celery cabbage lettuce radish turnip bread butter cheese milk
cream yogurt egg rice pasta flour sugar salt honey jam tea coffee cocoa juice water soda beer wine chicken beef
pork lamb fish shrimp crab tuna salmon bacon ham sausage soup salad pizza cake pie cookie candy chocolate
vanilla cinnamon ginger mint basil thyme sage parsley nut almond walnut peanut bean pea corn oat wheat barley
soap brush towel candle match paper pencil pen ink glue tape
"""
_NAMES = [*_GOODS.split(), *(f"{size} {name}" for size in ("small", "large") for name in _GOODS.split())]

_ASKED = (
    "This is a list of goods and their prices. Add up the prices one by one, from the first to the last. Write a line "
    "for each: its name, the sum so far, its price, and the new sum.\n\nList:\n"
)


@register
class RunningSums(Task):
    """Asks for every partial sum of a list of prices; the score is the share of lines that are right.

    A line is right if it adds its price to the sum of the line before, right or wrong, so that an error counts once.
    The first three lines are given, and do not count.
    """

    name = "running_sums"
    source = "own"
    metric = "right lines"

    goods: int = Field(60, ge=4, le=len(_NAMES), description="Lines of the list.")

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        return [self._sample(random.Random(f"{seed} {index}"), tokenizer) for index in range(count)]

    def _sample(self, rng: random.Random, tokenizer: Tokenizer) -> Sample:
        prices = {
            name: rng.randint(1, 9) for name in rng.sample(_NAMES[: max(self.goods, len(_NAMES) // 3)], self.goods)
        }
        lines, total = [], 0
        for name, price in prices.items():
            lines.append(f"{name}: {total} + {price} = {total + price}")
            total += price
        prefix, answer = "\n".join(lines[:3]), "\n" + "\n".join(lines[3:])
        listed = "\n".join(f"{name}: {price}" for name, price in prices.items())
        max_tokens = len(tokenizer.encode(answer, add_special_tokens=False)) + 16
        question = f"{_ASKED}{listed}\n\n{prefix}"
        return Sample("", question, [answer], max_tokens, data={"prices": prices}, answer_prefix=prefix)

    def score(self, sample: Sample, completion: Completion) -> float:
        found: dict[str, tuple[int, ...]] = {}
        text = sample.answer_prefix + completion.text
        for name, *numbers in re.findall(r"^([\w ]+): (\d+) \+ (\d+) = (\d+)$", text, re.MULTILINE):
            found.setdefault(name, tuple(map(int, numbers)))
        right, before = -3, 0
        for name, price in sample.data["prices"].items():
            line = found.get(name, (-1, -1, -1))
            right += line == (before, price, before + price)
            before = line[2]
        return right / (self.goods - 3)
