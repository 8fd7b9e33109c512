"""Chains of variable assignments."""

import random
import string
from typing import ClassVar

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Sample, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.ruler.fitting import Draw, largest_fitting
from vllm_kvmerge.evaluation.tasks.ruler.task import SHORT, Synthetic
from vllm_kvmerge.evaluation.tasks.ruler.text import NOISE, distinct_names


@register
class VariableTracking(Synthetic):
    """Chains of assignments among repeated sentences; asked is which variables got the first chain's value.

    A short solved example precedes.
    """

    name: ClassVar[str] = "ruler_vt"
    tokens_to_generate: ClassVar[int] = 30
    example_tokens: ClassVar[int] = 500
    """Most tokens of the solved example, without its solution."""
    template: ClassVar[str] = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    )
    question: ClassVar[str] = (
        "Question: Find all variables that are assigned the value {query} in the text above."
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        "the value {query}, they are: "
    )

    num_chains: int = Field(1, ge=1, description="Chains.")
    num_hops: int = Field(4, ge=1, description="Assignments of a variable to a variable in each chain.")

    def step(self) -> int:
        return 10 if self.length >= SHORT else 5

    def minimum(self) -> int:
        return self.num_hops + 1

    def generator(self, rng: random.Random, tokenizer: Tokenizer) -> Draw:
        def example_fits(units: int) -> bool:
            return len(tokenizer.encode(self._draw(rng, units, letters=3).prompt)) <= self.example_tokens

        example_units, _ = largest_fitting(example_fits, 5, self.minimum())

        def draw(index: int, units: int) -> Sample:
            example = self._draw(rng, example_units, letters=3)
            sample = self._draw(rng, units, letters=5)
            solved = f"{example.prompt} {' '.join(example.references)}\n\n"
            return self._sample(solved + sample.context, sample.question, sample.references)

        return draw

    def _draw(self, rng: random.Random, units: int, letters: int) -> Sample:
        names = distinct_names(rng, self.num_chains * (self.num_hops + 1), string.ascii_uppercase, letters)
        chains = [names[place : place + self.num_hops + 1] for place in range(0, len(names), self.num_hops + 1)]
        values = [str(rng.randrange(10_000, 99_999)) for _ in chains]
        lines = [NOISE] * units
        for chain, value in zip(chains, values, strict=True):
            # The official lines end with a space where a variable is assigned to a variable.
            hops = [f"VAR {name} = VAR {origin} " for origin, name in zip(chain, chain[1:], strict=False)]
            places = sorted(rng.sample(range(len(lines)), len(chain)))
            for moved, (place, line) in enumerate(zip(places, [f"VAR {chain[0]} = {value}", *hops], strict=True)):
                lines.insert(place + moved, line)
        question = self.question.format(query=values[0], count=self.num_hops + 1)
        return self._sample(self.template.format(context="\n".join(lines)), question, chains[0])
