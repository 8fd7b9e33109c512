"""Long lists in which some entries must hold what was asked for: LongGenBench (arXiv 2409.02076).

Instructions and what is counted are those of github.com/mozhu621/LongGenBench (``Dataset/building_16K.ipynb``,
``Evalution/inference.py``, ``Evalution/eval.py``). Two things are not:

- Events, facilities and the example entry are our own, and lists may be shorter. The official prompts are read from a
  copy of ``Dataset/Dataset_short.json`` or ``Dataset_long.json`` (``data_file``).
- There, Llama 3.1 8B Instruct is asked whether an entry includes an event. Here, the entry must have every word of it
  that says something, see ``mentions``; so figures can be compared with each other, but not with the paper's.
"""

import json
import random
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, ClassVar, Literal

from pydantic import Field

from vllm_kvmerge.evaluation.tasks.base import Completion, Sample, Task, Tokenizer, register
from vllm_kvmerge.evaluation.tasks.data import choose, read_text

SEPARATOR = "#*#"
STARTED = "*** started ***"
FINISHED = "*** finished"
KINDS = ("once", "range", "periodic")

ENTRIES = "How many to ask for."
MIN_WORDS = "Words that each is to have."

Quantity = Literal["completion_rate", "once", "range", "periodic", "average", "stic_1", "stic_2"]


# What is counted


def parse_entries(text: str, unit: str) -> dict[int, str]:
    """The entries of a list by number: the first that has each, as in ``Floor 7``, without these words."""
    entries: dict[int, str] = {}
    for block in text.partition(FINISHED)[0].split(SEPARATOR):
        if (match := re.search(rf"{unit} (\d+)", block)) is not None:
            entries.setdefault(int(match[1]), block[: match.start()] + block[match.end() :])
    return entries


_SAYS_LITTLE = (
    "an the of in at to for and or with on by from through like my your our featuring go use part play "
    "attend attending join joining participate participating take taking visit visiting explore exploring"
)
"""Words that an entry may lack."""


def _stem(word: str) -> str:
    """Without plural, ``-ing`` and ``-ed``; not a word, but alike for a word's forms."""
    for suffix in ("ing", "ies", "ed", "es", "s", "e", "y"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word.removesuffix(suffix)
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def _words(text: str) -> set[str]:
    words = re.findall(r"[^\W\d_]{2,}", text.lower())
    return {_stem(word) for word in words if word not in _SAYS_LITTLE.split()}


def mentions(entry: str, event: str) -> bool:
    """True if an entry has all of an event's words, in any order and form.

    Left out are what stands in parentheses, numbers, and words such as ``of`` and ``attending``.

    Raises:
        ValueError: the event has no other words.
    """
    wanted = _words(re.sub(r"\([^)]*\)", "", event))
    if not wanted:
        raise ValueError(f"the event {event!r} has no words to look for")
    return wanted <= _words(entry)


def measure(entries: Mapping[int, str], number: int, checks: Mapping[str, Mapping[int, str]]) -> dict[Quantity, float]:
    """All quantities of one list, from 0 to 1.

    entries: by number; ``number`` were asked for. checks: for each of ``KINDS``, the events by number of the entry.

    completion_rate: the share of entries that are there. once, range, periodic: among the events whose entry is there,
    the share that it mentions (0 if there is none). average: the mean of these three. stic_1: the same share of all
    three together. stic_2: of all events, the share that their entries mention.
    """
    met, there = {}, {}
    for kind in KINDS:
        found = [mentions(entries[place], event) for place, event in checks[kind].items() if place in entries]
        met[kind], there[kind] = sum(found), len(found)
    shares: dict[Quantity, float] = {kind: met[kind] / max(1, there[kind]) for kind in KINDS}  # type: ignore[misc]
    num_checks = sum(len(checks[kind]) for kind in KINDS)
    return {
        "completion_rate": sum(place in entries for place in range(1, number + 1)) / number,
        **shares,
        "average": sum(shares.values()) / len(KINDS),
        "stic_1": sum(met.values()) / max(1, sum(there.values())),
        "stic_2": sum(met.values()) / num_checks,
    }


# What is asked for


@dataclass(frozen=True)
class Assignment:
    """prompt: all of it. heading: the first entry's, which ends the prompt. checks: as ``measure`` has them."""

    prompt: str
    heading: str
    number: int
    checks: dict[str, dict[int, str]]


class LongGen(Task):
    """A list of numbered entries with three kinds of demands: on one entry, on a range of them, on every so many.

    MorphKV (section 5.2) draws ten lists of each scenario and generates greedily, up to 8,192 tokens; the official
    evaluation allows 16,000.
    """

    source: ClassVar[str] = "LongGenBench, arXiv 2409.02076"
    metric: ClassVar[str] = "share of demands met"
    unit: ClassVar[str]
    """Word that an entry's heading begins with."""

    entries: int
    min_words: int
    max_tokens: int = Field(8192, ge=1, description="After which an answer is cut off.")
    quantity: Quantity = Field("stic_2", description="What the score is.")
    data_file: str | None = Field(None, description="A copy of the official prompts, to use instead of our own.")

    def samples(self, count: int, seed: int, tokenizer: Tokenizer) -> list[Sample]:
        """``count`` new lists; of the official ones all, or ``count`` drawn at random."""
        rng = random.Random(seed)
        if self.data_file is None:
            assignments = [self._draw(rng) for _ in range(count)]
        else:
            assignments = choose(self._read(self.data_file), count, rng)
        return [self._sample(assignment) for assignment in assignments]

    def score(self, sample: Sample, completion: Completion) -> float:
        return self.measure(sample, completion.text)[self.quantity]

    def measure(self, sample: Sample, text: str) -> dict[Quantity, float]:
        """All quantities of a sample's answer."""
        entries = parse_entries(sample.data["heading"] + text, self.unit)
        checks = {kind: {int(place): event for place, event in sample.data[kind].items()} for kind in KINDS}
        return measure(entries, sample.data["number"], checks)

    @abstractmethod
    def _draw(self, rng: random.Random) -> Assignment:
        """A new list to ask for."""

    def _sample(self, assignment: Assignment) -> Sample:
        demands, started, rest = assignment.prompt.rpartition(STARTED)
        checks = {kind: {str(place): event for place, event in assignment.checks[kind].items()} for kind in KINDS}
        data = {"heading": assignment.heading, "number": assignment.number, **checks}
        return Sample(demands, started + rest, [], self.max_tokens, data=data)

    def _read(self, path: str) -> list[Assignment]:
        text = read_text("data_file", path)
        try:
            return [
                Assignment(row["prompt"], row["prefix"], row["number"], {kind: _numbered(row, kind) for kind in KINDS})
                for row in json.loads(text)
                if row["type"] == self.unit
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"data_file: {path} is not a data set of LongGenBench: {error!r}") from error


def _numbered(row: Mapping[str, Any], kind: str) -> dict[int, str]:
    """Without what some official menus demand of weeks after the last one."""
    checks = {int(place): event for place, event in row[f"checks_{kind}"].items()}
    return {place: event for place, event in checks.items() if place <= row["number"]}


def _every(start: int, step: int, last: int, event: str) -> dict[int, str]:
    return dict.fromkeys(range(start, last + 1, step), event)


_JANUARY_1 = date(2018, 1, 1)
"""A Monday."""


def _month_day(day: date) -> str:
    return f"{day:%B} {day.day:02}"


def _ordinal(number: int) -> str:
    suffix = "th" if 11 <= number % 100 <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _last_day(weeks: int) -> str:
    """Last day of a year's first weeks; the benchmark has the 52nd end on December 31st."""
    day = _JANUARY_1 + timedelta(days=7 * weeks - 1)
    if weeks == 52:
        return "December 31st"
    return f"{day:%B} {_ordinal(day.day)}"


def _period(weeks: int) -> str:
    return "for the entire year of 2018" if weeks == 52 else f"for the first {weeks} weeks of 2018"


_NAMES = ("Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiroshi")
_OCCUPATIONS = ("carpenter", "geologist", "librarian", "pilot", "translator", "veterinarian")
_RANGE_EVENTS = (
    "Canoe trip down the Danube", "Sheepdog training course in Wales", "Archaeological dig in Crete",
    "Train journey across Siberia", "Bread baking course in Lyon", "Volcano walks on Stromboli",
    "Orchestra rehearsals in Vienna", "Beekeeping course in Slovenia",
)  # fmt: skip
_PERIODIC_EVENTS = (
    "Attend a choir rehearsal", "Repair bicycles at the youth centre", "Play badminton with the neighbours",
    "Visit the flea market", "Attend a calligraphy lesson", "Volunteer at the soup kitchen", "Join a mushroom walk",
    "Practise archery in the castle meadow",
)  # fmt: skip
_MEMBERS = ("my wife", "my child_1", "my father", "my mother", "my sister", "my uncle")


@register
class Diary(LongGen):
    """A weekly diary; birthdays are the demands on single entries, by date."""

    name = "longgen_diary"
    unit = "Week"

    entries: int = Field(52, ge=8, le=52, description=ENTRIES)
    min_words: int = Field(200, ge=1, description=MIN_WORDS)

    def _draw(self, rng: random.Random) -> Assignment:
        last, name = self.entries, rng.choice(_NAMES)
        once: dict[int, str] = {}
        birthdays = ""
        for member, week in zip(rng.sample(_MEMBERS, 5), rng.sample(range(2, last + 1), 5), strict=True):
            day = _JANUARY_1 + timedelta(days=7 * (week - 1) + rng.randrange(7))
            birthdays += f"{member} (birthday on {_month_day(day)}), "
            once[week] = f"{member} birthday"
        event, week = rng.choice(_RANGE_EVENTS), rng.randint(2, last - 1)
        regular, step = rng.choice(_PERIODIC_EVENTS), rng.choice((3, 4, 5))
        start = rng.randint(max(2, 10 * last // 52), max(2, 19 * last // 52))
        heading = f"{SEPARATOR} Week 1 (January 1st - January 7th):"
        example = (
            f"{heading} \nA quiet, cold start of the year. We took down the decorations, walked by the river on "
            "Sunday, and at work the new plans were handed out."
        )
        prompt = (
            f"{name} is a {rng.choice(_OCCUPATIONS)} with a passion for chronicling his vibrant life through weekly "
            f"diary entries. Captures:\n1) Family member birthday: {birthdays}\n"
            f"2) {event} in week {week}-{week + 1}.\n\n"
            f"3) {regular} every {step} weeks on weekends, starting from week {start}.\n"
            " 4) Weekly updates on weather changes, work developments, family life, and other interesting topics.\n"
            f"5) Use '{SEPARATOR}' to separate each weekly entry (e.g. {example})\n"
            f"Generate a complete weekly diary for {name} {_period(last)}. Start from January 1st, a Monday, marking "
            f"the first week, and continue through to {_last_day(last)}, the end of the {_ordinal(last)} week. Ensure "
            f"that the diary consists of {last} entries, one for each week. Each diary entry should be at least "
            f"{self.min_words} words. When the design of all {last} weeks is complete, use '{FINISHED} ***' to "
            "indicate the end of the document. Ensure clarity and continuity without any interruptions or omissions in "
            f"the narrative throughout the year. {STARTED}\n{heading}"
        )
        checks = {
            "once": once,
            "range": _every(week, 1, week + 1, event),
            "periodic": _every(start, step, last, regular),
        }
        return Assignment(prompt, heading, last, checks)


_FEASTS = (
    ("Harvest Moon Supper", "Pheasant Pie"), ("Fisherman's Jubilee", "Monkfish Stew"),
    ("Poets' Banquet", "Saffron Risotto"), ("Orchard Gala", "Quince Tart"), ("Lantern Night", "Sesame Dumplings"),
    ("Founders' Luncheon", "Beef Wellington"), ("Skaters' Ball", "Chestnut Soup"),
    ("Cartographers' Dinner", "Tagine with Apricots"),
)  # fmt: skip
_SEASONS = (
    ("Asparagus Weeks", "White Asparagus with Ham"), ("Crab Carnival", "Dressed Crab"),
    ("Citrus Days", "Blood Orange Salad"), ("Wild Herb Season", "Nettle Gnocchi"),
)  # fmt: skip
_REGULARS = (
    ("Curry Wednesdays", "Lentil Dal"), ("Oyster Fridays", "Grilled Oysters"), ("Crepe Sundays", "Buckwheat Crepes"),
    ("Barbecue Thursdays", "Smoked Ribs"),
)  # fmt: skip


@register
class Menu(LongGen):
    """A restaurant's menu for every week; feasts, by date, are the demands on single entries."""

    name = "longgen_menu"
    unit = "Menu Week"

    entries: int = Field(52, ge=8, le=52, description=ENTRIES)
    min_words: int = Field(200, ge=1, description=MIN_WORDS)

    def _draw(self, rng: random.Random) -> Assignment:
        last = self.entries
        once: dict[int, str] = {}
        feasts: list[str] = []
        for (feast, dish), week in zip(rng.sample(_FEASTS, 5), rng.sample(range(2, last + 1), 5), strict=True):
            day = _JANUARY_1 + timedelta(days=7 * (week - 1) + rng.randrange(7))
            feasts.append(f"1.{len(feasts) + 1} Celebrate '{feast}' on {day:%m-%d} with a special dish: {dish}.")
            once[week] = f"{feast} featuring {dish}"
        season, plate = rng.choice(_SEASONS)
        length = rng.randint(1, 4)
        first = rng.randint(2, last - length + 1)
        regular, course = rng.choice(_REGULARS)
        step = rng.choice((2, 3, 4, 5))
        start = rng.randint(2, max(2, 30 * last // 52 - step))
        heading = f"{SEPARATOR} Menu Week 1 (January 1st - January 7th):"
        example = (
            f"{heading} \n1. Appetizers: 1.1) Leek tartlets. 1.2) Smoked trout. 2. Main Courses: 2.1) Braised lamb. "
            "2.2) Mushroom pie. 3. Side Dishes: 3.1) Mashed potatoes. 3.2) Red cabbage. 4. Desserts: 4.1) Baked "
            "apples. 4.2) Walnut cake. 5. Drinks: 5.1) Cider. 5.2) Mint tea."
        )
        feast_lines = "\n".join(feasts)
        year = "an entire year's menu for 2018" if last == 52 else f"a menu for the first {last} weeks of 2018"
        prompt = (
            "As Chef Roy Hee, a world-renowned chef at a globally renowned restaurant, you are tasked with designing "
            f"{year}. Your menu should be varied and innovative, adhering to the following guidelines:"
            f"\n1): {feast_lines}\n2) Feature '{season}' from Week {first} to Week {first + length - 1} with dishes "
            f"like: {plate}.\n3) Include '{regular}' every {step} weeks starting from Week {start}, serving: "
            f"{course}.\n"
            f"4) Use '{SEPARATOR}' to separate each weekly menu (e.g. {example})\n"
            f"Generate a comprehensive weekly menu diary {_period(last)}, start from January 1st, a Monday, marking "
            f"the first week, and continue through to {_last_day(last)}, the end of the {_ordinal(last)} week. Ensure "
            f"that the diary consists of {last} entries, one for each week.\n- Each weekly menu must include a "
            "detailed description of the offerings, featuring at least two options for appetizers, main courses, side "
            f"dishes, desserts, and drinks. Aim for between {self.min_words} and {self.min_words + 20} words per menu "
            f"description to ensure thoroughness and richness of detail.\n- Conclude the diary with '{FINISHED}' to "
            "signify the completion of the year's menu planning.\n- Ensure clarity and continuity without any "
            f"interruptions or omissions in the menu throughout the year. {STARTED}\n{heading}"
        )
        checks = {
            "once": once,
            "range": _every(first, 1, first + length - 1, f"{season} featuring {plate}"),
            "periodic": _every(start, step, last, f"{regular} featuring {course}"),
        }
        return Assignment(prompt, heading, last, checks)


_FACILITIES = (
    "violin maker", "dental clinic", "notary office", "planetarium", "ceramics workshop", "chess club",
    "radio station", "puppet theatre", "tax consultancy", "map archive",
)  # fmt: skip
_RANGE_FACILITIES = ("hotel with panoramic suites", "university of applied sciences", "indoor climbing hall")
_PERIODIC_FACILITIES = ("winter garden", "tea room", "fire refuge", "sculpture terrace")


@register
class Skyscraper(LongGen):
    """A skyscraper, floor by floor."""

    name = "longgen_skyscraper"
    unit = "Floor"

    entries: int = Field(100, ge=10, description=ENTRIES)
    min_words: int = Field(150, ge=1, description=MIN_WORDS)

    def _draw(self, rng: random.Random) -> Assignment:
        last = self.entries
        once = dict(zip(rng.sample(range(2, last + 1), 5), rng.sample(_FACILITIES, 5), strict=True))
        single = "".join(f"  - Designate Floor {floor} for {facility} use.\n" for floor, facility in once.items())
        length = rng.randint(3, 7)
        first = rng.randint(2, last - length)
        facility, regular = rng.choice(_RANGE_FACILITIES), rng.choice(_PERIODIC_FACILITIES)
        step = max(2, rng.choice((15, 20, 25, 30)) * last // 100)
        start = 20 * last // 100 + step
        heading = f"{SEPARATOR} Floor 1:"
        example = (
            f"{heading} \nThe entrance hall. 1) Structure: a ceiling of twelve metres over granite. 2) Reception: a "
            "long desk by the door. 3) Seating: armchairs along the glass front."
        )
        prompt = (
            f"Construct a skyscraper with {last} floors. Please follow the detailed floor assignments below:\n"
            f"1) Specific floors requirements:\n{single}"
            f"2) Range floors requirements: Allocate Floors {first} to {first + length - 1} for a {facility}.\n"
            f"3) Periodic floors requirements: Include a {regular} every {step} floors, starting from Floor {start}\n"
            "4) Document each floor independently with detailed descriptions of the intended facilities, architectural "
            "features, and unique design elements.\n"
            f"5) Use '{SEPARATOR}' to separate the documentation for each floor (e.g. {example}).\n"
            f" Ensure that the document consists of {last} entries, each containing at least {self.min_words} words. "
            "Ensure clarity and continuity without any interruptions or omissions in the narrative throughout the "
            f"document. When the design of all {last} floors is complete, use '{FINISHED}' to indicate the end of the "
            f"document. {STARTED}\n{heading}"
        )
        checks = {
            "once": once,
            "range": _every(first, 1, first + length - 1, facility),
            "periodic": _every(start, step, last, regular),
        }
        return Assignment(prompt, heading, last, checks)


_COLUMNS = 10
_BLOCK_USES = (
    "aquarium", "courthouse", "tram depot", "observatory", "weaving mill", "velodrome", "concert hall", "fish market",
    "botanical institute", "water tower",
)  # fmt: skip
_RANGE_USES = ("harbour quarter", "artisan district", "university campus", "allotment gardens")
_PERIODIC_USES = ("bicycle workshop", "drinking fountain", "post office", "playground")


@register
class City(LongGen):
    """A city, block by block, on a grid of ten columns; block (x, y) is number 10 y + x + 1."""

    name = "longgen_city"
    unit = "Block"

    entries: int = Field(100, ge=20, le=100, multiple_of=_COLUMNS, description=ENTRIES)
    min_words: int = Field(150, ge=1, description=MIN_WORDS)

    def _draw(self, rng: random.Random) -> Assignment:
        last, rows = self.entries, self.entries // _COLUMNS

        def number(x: int, y: int) -> int:
            return _COLUMNS * y + x + 1

        places = rng.sample([(x, y) for y in range(rows) for x in range(_COLUMNS) if (x, y) != (0, 0)], 5)
        uses = dict(zip(places, rng.sample(_BLOCK_USES, 5), strict=True))
        single = "".join(f"  - Designate Block at ({x}, {y}) for {use} use.\n" for (x, y), use in uses.items())
        length = rng.randint(2, min(4, rows))
        # The benchmark's words for the two directions, although a row's blocks are numbered in a row.
        if rng.random() < 0.5:
            direction, fixed, start = "row", rng.randrange(_COLUMNS), rng.randint(0, min(6, rows - length))
            strip = [(fixed, start + i) for i in range(length)]
        else:
            direction, fixed, start = "column", rng.randrange(rows), rng.randint(0, 6)
            strip = [(start + i, fixed) for i in range(length)]
        use, regular, step = rng.choice(_RANGE_USES), rng.choice(_PERIODIC_USES), rng.choice((2, 4))
        row = min(5, rows - 1)
        heading = f"{SEPARATOR} Block 1 (0, 0):"
        example = (
            f"{heading} \nA gallery of glass and steel. Architecture: one hall, open on three sides. Purpose: changing "
            "exhibitions. City Value: it draws visitors to this corner."
        )
        prompt = (
            f"Design a vibrant and diverse city using a {_COLUMNS}x{rows} block grid, numbered from 1 to {last}. "
            "Arrange the blocks sequentially from left to right and top to bottom. Ensure that each block is uniquely "
            "planned to reflect a wide array of city facilities, highlighting the rich urban environment and cultural "
            "diversity."
            f"1) Specific block requirements:\n{single}2) Range block requirements: Allocate a {use} along the "
            f"{direction} from ({strip[0][0]}, {strip[0][1]}) to ({strip[-1][0]}, {strip[-1][1]}).\n"
            f"3) Periodic block requirements: Include a {regular} starting from Block at (0, {row}) with an interval "
            f"of every {step} blocks along the column.\n4) Document each block independently with detailed "
            "descriptions of the intended facilities, architectural features, and unique design elements.\n"
            f"5) Use '{SEPARATOR}' to separate the documentation for each block like (e.g. {example})\n"
            f"Ensure that the document consists of {last} entries, each containing at least {self.min_words} words. "
            "Ensure that the document contains detailed descriptions for each block, with a minimum of "
            f"{self.min_words} words per description. Ensure clarity and continuity in the narrative throughout the "
            "document without any interruptions or omissions. When all block assignments are complete, use "
            f"'{FINISHED}' to indicate the end of the document. {STARTED}\n{heading}"
        )
        checks = {
            "once": {number(x, y): use for (x, y), use in uses.items()},
            "range": {number(x, y): use for x, y in strip},
            "periodic": {number(x, row): regular for x in range(0, _COLUMNS, step)},
        }
        return Assignment(prompt, heading, last, checks)
