"""LongBench's sixteen English tasks (arXiv 2308.14508): their prompts, how these are cut to a length, and the metrics.

Prompts, lengths of answers and metrics are those of github.com/THUDM/LongBench (`config/dataset2prompt.json`,
`config/dataset2maxlen.json`, `metrics.py`, `eval.py`). The data is downloaded from Hugging Face, or read from files.
"""

import difflib
import random
import re
import string
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import choose, parse_rows, read_text

Metric = Callable[[str, str, list[str]], float]
"""(prediction, reference, all classes) -> 0..1."""


# Metrics


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and superfluous space."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def qa_f1(prediction: str, reference: str, classes: list[str]) -> float:
    """F1 of the bags of normalised words."""
    predicted, right = normalize_answer(prediction).split(), normalize_answer(reference).split()
    common = (Counter(predicted) & Counter(right)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, reference: str, classes: list[str]) -> float:
    """F of the package `rouge`, 0 where it gives up: an empty text, or sentences too long for its recursion."""
    try:
        return _rouge().get_scores([prediction], [reference])[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


@cache
def _rouge() -> Any:
    try:
        from rouge import Rouge
    except ImportError as error:
        raise ImportError("LongBench's summaries are scored by rouge: pip install 'vllm-kvmerge[eval]'") from error
    return Rouge(metrics=["rouge-l"], stats=["f"])


def classification(prediction: str, reference: str, classes: list[str]) -> float:
    """One over the number of classes that the prediction names, if the right one is among them."""
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            del named[place]
            # The official loop removes names while it goes over them: it never looks at the one after.
        place += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: list[str]) -> float:
    """The share of the prediction's numbers that are the reference's, ``Paragraph 7``."""
    right = re.search(r"Paragraph (\d+)", reference)
    if right is None:
        raise ValueError(f"the answer {reference!r} names no paragraph")
    return count(prediction, right[1], classes)


def count(prediction: str, reference: str, classes: list[str]) -> float:
    """The share of the prediction's numbers that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, classes: list[str]) -> float:
    """Similarity of the prediction's first line that looks like code: fuzzywuzzy's ratio, in whole percent.

    Of fuzzywuzzy's two implementations it is the one that it has without python-Levenshtein, as LongBench's
    requirements install it: difflib's.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, code, reference).ratio()) / 100


_METRIC_NAMES: dict[Metric, str] = {
    qa_f1: "F1",
    rouge_l: "ROUGE-L",
    classification: "classification",
    retrieval: "retrieval",
    count: "count",
    code_similarity: "code similarity",
}


# Datasets


@dataclass(frozen=True)
class _Dataset:
    """max_tokens: of an answer. first_line: whether only the answer's first line counts."""

    prompt: str
    max_tokens: int
    metric: Metric
    first_line: bool = False


_STORY = "as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
)
_MULTI_HOP = _Dataset(
    f"{_PASSAGES}The following are given passages.\n{{context}}\n\n{_PASSAGES}Question: {{input}}\nAnswer:", 32, qa_f1
)

DATASETS = {
    "narrativeqa": _Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"asconcisely {_STORY}Story: {{context}}\n\nNow, answer the question based on the story asconcisely {_STORY}"
        "Question: {input}\n\nAnswer:",
        128,
        qa_f1,
    ),
    "qasper": _Dataset(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}Article: {{context}}\n\n"
        f" Answer the question based on the above article {_ARTICLE}Question: {{input}}\n\nAnswer:",
        128,
        qa_f1,
    ),
    "multifieldqa_en": _Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        qa_f1,
    ),
    "hotpotqa": _MULTI_HOP,
    "2wikimqa": _MULTI_HOP,
    "musique": _MULTI_HOP,
    "gov_report": _Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        rouge_l,
    ),
    "qmsum": _Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        rouge_l,
    ),
    "multi_news": _Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
    "trec": _Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        classification,
        first_line=True,
    ),
    "triviaqa": _Dataset(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        qa_f1,
        first_line=True,
    ),
    "samsum": _Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        rouge_l,
        first_line=True,
    ),
    "passage_count": _Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        count,
    ),
    "passage_retrieval_en": _Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        retrieval,
    ),
    "lcc": _Dataset("Please complete the code given below. \n{context}Next line of code:\n", 64, code_similarity),
    "repobench-p": _Dataset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, code_similarity
    ),
}
"""The sixteen, by their official names."""


# Tasks


class LongBench(Task):
    """Questions about texts of LongBench, with the official prompt around them.

    The official evaluation cuts prompts to some 500 tokens less than the model's context. Data that is not named is
    downloaded: data.zip of THUDM/LongBench on Hugging Face (114 MB, once).
    """

    source: ClassVar[str] = "LongBench, arXiv 2308.14508"
    dataset: ClassVar[str]

    max_length: int | None = Field(
        None, ge=2, description="Tokens of a prompt; of a longer one the middle is left out; default: any number."
    )
    data_dir: str | None = Field(None, description="A folder with DATASET.jsonl, as data.zip has it.")
    data_file: str | None = Field(None, description="Instead: one such file.")

    @model_validator(mode="after")
    def _one_place_of_data(self) -> "LongBench":
        if self.data_dir is not None and self.data_file is not None:
            raise ValueError("data_dir, data_file: only one of them can be given")
        return self

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """All, in their order, or ``count`` of them drawn at random."""
        if DATASETS[self.dataset].metric is rouge_l:
            _rouge()  # it should not be missed only after the model has answered
        return [self._sample(row, tokenizer) for row in choose(self._rows(), count, random.Random(seed))]

    def score(self, sample: Sample, completion: Completion) -> float:
        dataset = DATASETS[self.dataset]
        prediction = completion.text
        if dataset.first_line:
            prediction = prediction.lstrip("\n").partition("\n")[0]
        classes = sample.data.get("all_classes", [])
        return max(dataset.metric(prediction, reference, classes) for reference in sample.references)

    def _sample(self, row: dict[str, Any], tokenizer: Tokenizer) -> Sample:
        dataset = DATASETS[self.dataset]
        context, question = split_template(dataset.prompt)
        context, question = context.format(**row), question.format(**row)
        if self.max_length is not None:
            context, question = truncate_middle(context, question, self.max_length, tokenizer)
        data = {} if row["all_classes"] is None else {"all_classes": list(row["all_classes"])}
        return Sample(context, question, list(row["answers"]), dataset.max_tokens, data=data)

    def _rows(self) -> list[dict[str, Any]]:
        file = f"{self.dataset}.jsonl"
        if self.data_file is not None:
            field, path = "data_file", self.data_file
        elif self.data_dir is not None:
            field, path = "data_dir", str(Path(self.data_dir, file))
        else:
            return _parse(f"{file} of THUDM/LongBench", _download(f"data/{file}"))
        return _parse(f"{field}: {Path(path).expanduser()}", read_text(field, path).split("\n"))


def split_template(prompt: str) -> tuple[str, str]:
    """A template up to its context and the line ends that follow it, and the rest of it."""
    end = prompt.index("{context}") + len("{context}")
    while prompt[end] == "\n":
        end += 1
    return prompt[:end], prompt[end:]


def truncate_middle(context: str, question: str, max_length: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """Context and question of a prompt of which only the first and last ``max_length / 2`` tokens are kept.

    The two join to the official prompt, with one exception: the question stays as it is where the tokenizer cannot
    give it back.
    """
    tokens = tokenizer.encode(context + question)
    if len(tokens) <= max_length:
        return context, question
    half = max_length // 2
    head = tokenizer.decode(tokens[:half], skip_special_tokens=True)
    tail = tokenizer.decode(tokens[-half:], skip_special_tokens=True)
    if tail.endswith(question):
        return head + tail.removesuffix(question), question
    num_asked = len(tokenizer.encode(question, add_special_tokens=False))
    if num_asked >= half:
        return head, tail
    return head + tokenizer.decode(tokens[-half:-num_asked], skip_special_tokens=True), question


def _parse(origin: str, lines: Iterable[str]) -> list[dict[str, Any]]:
    rows = []
    for place, row in parse_rows(origin, lines):
        if missing := {"input", "context", "answers", "all_classes"} - row.keys():
            raise ValueError(f"{place}: lacks {', '.join(sorted(missing))}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{origin}: has no samples")
    return rows


def _download(member: str) -> list[str]:
    """The lines of a file in the data.zip of THUDM/LongBench.

    Not with `datasets`: since its version 4 it no longer runs the script that this dataset is loaded by.
    """
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download("THUDM/LongBench", "data.zip", repo_type="dataset")
    except OSError as error:
        raise ValueError(f"cannot download THUDM/LongBench; data_dir can name a local copy ({error})") from error
    with zipfile.ZipFile(path) as archive:
        return archive.read(member).decode().split("\n")


for _name, _entry in DATASETS.items():
    register(
        type(
            f"LongBench_{_name}",
            (LongBench,),
            {
                "__module__": __name__,
                "__doc__": LongBench.__doc__,
                "name": f"longbench_{_name}",
                "dataset": _name,
                "metric": _METRIC_NAMES[_entry.metric],
            },
        )
    )
