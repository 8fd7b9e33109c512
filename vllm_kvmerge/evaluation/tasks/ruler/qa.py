"""Questions about documents of a data set."""

import json
import math
import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Sample, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import read_text
from vllm_kvmerge.evaluation.tasks.ruler.fitting import NoRoomError, draw_fitting
from vllm_kvmerge.evaluation.tasks.ruler.task import Ruler, string_match_part


@dataclass(frozen=True)
class _Question:
    """documents: those that the question is about. related: of the same article. Both are places in the corpus."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


@dataclass(frozen=True)
class _Corpus:
    documents: list[str]
    questions: list[_Question]


class Qa(Ruler):
    """A question about one of many documents, or some of them; the others are of the same corpus.

    Questions come in the order of the corpus, without those whose own documents are too long.
    """

    metric: ClassVar[str] = "string_match_part"
    tokens_to_generate: ClassVar[int] = 32
    corpus: ClassVar[str]
    instruction: ClassVar[str] = (
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\n"
    )

    data_file: str | None = Field(None, description="The corpus, in its official format; it is not downloaded.")

    @staticmethod
    def match(prediction: str, references: list[str]) -> float:
        return string_match_part(prediction, references)

    @staticmethod
    @abstractmethod
    def parse(data: Any) -> _Corpus:
        """The corpus of a file that has been read.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the file has another format.
        """

    def step(self) -> int:
        return 10

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        rng, corpus = random.Random(seed), self._read_corpus()
        draw, fits = partial(self._draw, rng, corpus), partial(self._fits, tokenizer)
        units, step = self.size(lambda size: fits(draw(0, size)))
        samples: list[Sample] = []
        for index in range(len(corpus.questions)):
            if len(samples) == count:
                break
            try:
                samples.append(draw_fitting(draw, index, units, step, self.minimum(), fits))
            except NoRoomError:
                continue
        return samples

    def _read_corpus(self) -> _Corpus:
        if self.data_file is None:
            raise ValueError(f"data_file: name a local copy of {self.corpus}")
        text = read_text("data_file", self.data_file)
        try:
            corpus = self.parse(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"data_file: {self.data_file} does not have the format of {self.corpus}") from error
        if not corpus.questions:
            raise ValueError(f"data_file: {self.data_file} has no questions")
        return corpus

    def _draw(self, rng: random.Random, corpus: _Corpus, index: int, units: int) -> Sample:
        asked = corpus.questions[index]
        num_others = max(0, units - len(asked.documents))
        if units >= len(corpus.documents):
            documents = (corpus.documents * math.ceil(units / len(corpus.documents)))[:units]
        else:
            places = [*asked.documents]
            if num_others > len(asked.related):
                near = {*asked.documents, *asked.related}
                far = [place for place in range(len(corpus.documents)) if place not in near]
                places += asked.related + rng.sample(far, num_others - len(asked.related))
            else:
                places += rng.sample(asked.related, num_others)
            documents = [corpus.documents[place] for place in places]
        rng.shuffle(documents)
        context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
        return self._sample(
            f"{self.instruction}The following are given documents.\n\n{context}\n\n",
            f"{self.instruction}Question: {asked.text} Answer:",
            asked.answers,
        )


@register
class Squad(Qa):
    """Questions about a paragraph; the other paragraphs of its article come before those of other articles."""

    name: ClassVar[str] = "ruler_qa_1"
    corpus: ClassVar[str] = "SQuAD 2.0's dev-v2.0.json (rajpurkar.github.io/SQuAD-explorer)"

    @staticmethod
    def parse(data: Any) -> _Corpus:
        articles = [article["paragraphs"] for article in data["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        place = {document: index for index, document in enumerate(documents)}
        questions = []
        for article in articles:
            article_places = [place[paragraph["context"]] for paragraph in article]
            for paragraph in article:
                own = place[paragraph["context"]]
                related = [other for other in article_places if other != own]
                for asked in paragraph["qas"]:
                    if not asked["is_impossible"]:
                        answers = [answer["text"] for answer in asked["answers"]]
                        questions.append(_Question(asked["question"], answers, [own], related))
        return _Corpus(documents, questions)


@register
class HotpotQa(Qa):
    """Questions about two of ten paragraphs that come with them."""

    name: ClassVar[str] = "ruler_qa_2"
    corpus: ClassVar[str] = "HotpotQA's hotpot_dev_distractor_v1.json (hotpotqa.github.io)"

    @staticmethod
    def parse(data: Any) -> _Corpus:
        own_documents = [[f"{title}\n{''.join(lines)}" for title, lines in asked["context"]] for asked in data]
        documents = sorted({document for own in own_documents for document in own})
        place = {document: index for index, document in enumerate(documents)}
        questions = [
            _Question(asked["question"], [asked["answer"]], [place[document] for document in own], [])
            for asked, own in zip(data, own_documents, strict=True)
        ]
        return _Corpus(documents, questions)
