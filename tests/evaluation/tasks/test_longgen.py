"""LongGenBench's lists: what is asked for, and what is counted in lists written by hand."""

import json
import random
import re
from datetime import datetime

import pytest
from pydantic import ValidationError

from vllm_kvmerge.evaluation.tasks.base import TASKS, Completion, Sample
from vllm_kvmerge.evaluation.tasks.longgen import KINDS, City, Diary, LongGen, Menu, Skyscraper, measure, mentions
from vllm_kvmerge.evaluation.tasks.longgen import parse_entries as parse

SMALL = {Diary: 12, Menu: 12, Skyscraper: 20, City: 30}
SCENARIOS = sorted(SMALL, key=lambda scenario: scenario.name)


def draw(scenario: type[LongGen], seed: int = 0, count: int = 1, **options) -> list[Sample]:
    return scenario(**options).samples(count, seed, None)


def by_entry(sample: Sample) -> dict[int, set[str]]:
    """Everything that is asked of each entry."""
    wanted: dict[int, set[str]] = {}
    for kind in KINDS:
        for place, event in sample.data[kind].items():
            wanted.setdefault(int(place), set()).add(event)
    return wanted


def perfect(scenario: type[LongGen], sample: Sample) -> str:
    """An answer that does all that is asked for; it continues the first entry's heading."""
    wanted = by_entry(sample)
    entries = [f" {', '.join(wanted.get(place, ['nothing']))}.\n" for place in range(1, sample.data["number"] + 1)]
    return "".join(
        text if place == 1 else f"#*# {scenario.unit} {place} (x): {text}" for place, text in enumerate(entries, 1)
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_perfect_list_scores_one_and_an_empty_one_nothing(scenario):
    assert TASKS[scenario.name] is scenario
    for options in ({}, {"entries": SMALL[scenario]}):
        for sample in draw(scenario, 3, 5, **options):
            task = scenario(**options)
            assert set(task.measure(sample, perfect(scenario, sample)).values()) == {1}
            nothing = task.measure(sample, "")
            assert nothing["completion_rate"] == 1 / sample.data["number"]  # the prompt itself begins entry 1
            assert [nothing[q] for q in (*KINDS, "average", "stic_1", "stic_2")] == [0] * 6
            assert task.score(sample, Completion(perfect(scenario, sample))) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_asks_for_the_same(scenario):
    assert draw(scenario, 5, 4) == draw(scenario, 5, 4)
    assert draw(scenario, 5, 4)[:2] == draw(scenario, 5, 2)
    prompts = {sample.prompt for seed in (5, 6) for sample in draw(scenario, seed, 4)}
    assert len(prompts) == 8


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_prompts_ask_for_what_is_checked(scenario):
    for options in ({}, {"entries": SMALL[scenario]}):
        for sample in draw(scenario, 1, 40, **options):
            assert sample.question == f"*** started ***\n{sample.data['heading']}"
            assert sample.data == json.loads(json.dumps(sample.data))
            number = sample.data["number"]
            assert number == options.get("entries", scenario.model_fields["entries"].default)
            places = {kind: sorted(map(int, sample.data[kind])) for kind in KINDS}
            assert all(2 <= place <= number or scenario is City for place in by_entry(sample))
            assert len(places["once"]) == 5 and places["periodic"]
            steps = {b - a for a, b in zip(places["periodic"], places["periodic"][1:], strict=False)}
            assert len(steps) <= 1
            for events in by_entry(sample).values():
                for event in events:
                    event = event.replace(" birthday", " (birthday on")
                    assert all(part in sample.context for part in event.split(" featuring "))


def test_diary_dates_fall_into_their_weeks():
    for sample in draw(Diary, 2, 20):
        for day in re.finditer(r"(\S+ \S+) \(birthday on (\w+) (\d+)\)", sample.context):
            week = datetime.strptime(f"2018 {day[2]} {day[3]}", "%Y %B %d").isocalendar()[1]
            assert sample.data["once"][str(week)] == f"{day[1]} birthday"
        first, last = map(int, re.search(r"in week (\d+)-(\d+)\.", sample.context).groups())
        assert sorted(map(int, sample.data["range"])) == [first, last]
        step, start = map(
            int, re.search(r"every (\d+) weeks on weekends, starting from week (\d+)", sample.context).groups()
        )
        assert sorted(map(int, sample.data["periodic"])) == list(range(start, 53, step))


def test_the_end_of_a_shorter_diary():
    assert "through to March 25th, the end of the 12th week" in draw(Diary, entries=12)[0].context
    assert "through to December 31st, the end of the 52nd week" in draw(Diary)[0].context


def test_skyscraper_floors():
    for sample in draw(Skyscraper, 2, 20):
        text = sample.context
        first, last = map(int, re.search(r"Allocate Floors (\d+) to (\d+)", text).groups())
        assert sorted(map(int, sample.data["range"])) == list(range(first, last + 1))
        step, start = map(int, re.search(r"every (\d+) floors, starting from Floor (\d+)", text).groups())
        assert step in (15, 20, 25, 30) and start == 20 + step
        assert sorted(map(int, sample.data["periodic"])) == list(range(start, 101, step))


def test_city_blocks():
    """Block (x, y) is number 10 y + x + 1."""
    for sample in draw(City, 2, 20):
        for x, y, use in re.findall(r"Block at \((\d), (\d)\) for (.*) use", sample.context):
            assert sample.data["once"][str(10 * int(y) + int(x) + 1)] == use
        ends = re.search(r"from \((\d), (\d)\) to \((\d), (\d)\)", sample.context).groups()
        x1, y1, x2, y2 = map(int, ends)
        blocks = {10 * y + x + 1 for x in range(x1, x2 + 1) for y in range(y1, y2 + 1)}
        assert set(map(int, sample.data["range"])) == blocks


def test_entries_are_told_apart_by_separator_and_number():
    text = (
        "#*# Floor 1: a hall\n#*# Floor 2\nan office above Floor 1 #*# no number\n"
        "#*# **Floor 12**: a bar\n#*# Floor 2: again\nFloor 3: without a separator\n*** finished\n#*# Floor 4: late"
    )
    entries = parse(text, "Floor")
    assert sorted(entries) == [1, 2, 12]
    assert "an office" in entries[2] and "again" not in entries[2]
    assert parse("#*# Menu Week 7 (x): soup", "Menu Week") == {7: "  (x): soup"}
    assert parse("", "Floor") == {}


@pytest.mark.parametrize(
    ("entry", "event", "expected"),
    [
        ("The dental clinics open early.", "dental clinic", True),
        ("a clinic, and dentists", "dental clinic", False),
        ("In Paris we attended the Fashion Week.", "Attending a fashion week in Paris", True),
        ("a fashion show in Paris", "Attending a fashion week in Paris", False),
        ("we went hiking, then camped in the mountains", "Hiking and camping in the mountains", True),
        ("the husband's birthday", "husband (yourself) birthday", True),
        ("a birthday", "husband (yourself) birthday", False),
        ("our child has its birthday", "my child_1 birthday", True),
        ("Australia Day BBQ, with lamb chops", "Australia Day BBQ featuring Lamb Chops", True),
        ("Australia Day BBQ, with lamb", "Australia Day BBQ featuring Lamb Chops", False),
        ("small parks and libraries", "small park", True),
        ("libraries", "library", True),
        ("", "library", False),
    ],
)
def test_what_mentions_an_event(entry, event, expected):
    assert mentions(entry, event) is expected


def test_an_event_without_words_is_refused():
    with pytest.raises(ValueError, match="has no words"):
        mentions("anything", "attend the (yourself) 5")


def test_quantities_by_hand():
    """Ten entries are wanted, eight are there; of their seven events four are mentioned, two more are missing."""
    entries = {1: "hall", 2: "office", 3: "gym", 4: "bar", 5: "gym", 6: "gym, bar", 7: "x", 8: "bar", 11: "beyond"}
    checks = {
        "once": {2: "office", 7: "library", 9: "cinema"},
        "range": {5: "gym", 6: "gym"},
        "periodic": {4: "bar", 7: "bar", 10: "bar", 1: "restaurant"},
    }
    quantities = measure(entries, 10, checks)
    assert quantities == {
        "completion_rate": 0.8,
        "once": 1 / 2,
        "range": 1,
        "periodic": 1 / 3,
        "average": pytest.approx((1 / 2 + 1 + 1 / 3) / 3),
        "stic_1": 4 / 7,
        "stic_2": 4 / 9,
    }
    assert set(measure({}, 10, checks).values()) == {0}


def test_the_score_is_the_quantity_asked_for():
    (sample,) = draw(Skyscraper, entries=20)
    half = perfect(Skyscraper, sample).partition("#*# Floor 11 ")[0]
    scores = {
        quantity: Skyscraper(entries=20, quantity=quantity).score(sample, Completion(half))
        for quantity in Skyscraper(entries=20).measure(sample, half)
    }
    demands = [place for kind in KINDS for place in map(int, sample.data[kind])]
    assert scores["completion_rate"] == 0.5
    assert scores["stic_1"] == 1
    assert scores["stic_2"] == sum(place <= 10 for place in demands) / len(demands)
    assert Skyscraper(entries=20).score(sample, Completion(half)) == scores["stic_2"]


def test_official_prompts_from_a_file(tmp_path):
    rows = [
        {
            "prompt": f"Build {number}. *** started ***\n#*# Floor 1:",
            "checks_once": {"2": "office"},
            "checks_range": {"3": "gym", "9": "gym"},
            "checks_periodic": {"4": "bar"},
            "type": kind,
            "prefix": "#*# Floor 1:",
            "number": 4,
        }
        for number, kind in enumerate(["Floor", "Week", "Floor", "Floor"])
    ]
    path = tmp_path / "Dataset_short.json"
    path.write_text(json.dumps(rows))
    samples = draw(Skyscraper, count=9, data_file=str(path))
    assert [sample.context for sample in samples] == ["Build 0. ", "Build 2. ", "Build 3. "]
    assert samples[0].data["range"] == {"3": "gym"}  # there is no floor 9
    answer = Completion(" hall #*# Floor 2: offices #*# Floor 3: pool #*# Floor 4: a bar")
    assert Skyscraper(data_file=str(path)).score(samples[0], answer) == 2 / 3
    drawn = [draw(Skyscraper, seed, 2, data_file=str(path)) for seed in range(8)]
    assert drawn[0] == draw(Skyscraper, 0, 2, data_file=str(path))
    assert len({tuple(s.context for s in some) for some in drawn}) > 1
    with pytest.raises(ValueError, match="data_file: cannot read"):
        draw(Skyscraper, data_file=str(tmp_path / "other.json"))
    for text in ("[", "[1]", '[{"type": "Floor"}]'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a data set of LongGenBench"):
            draw(Skyscraper, data_file=str(path))


@pytest.mark.parametrize(
    ("scenario", "entries"), [(Diary, 53), (Diary, 7), (Menu, 53), (Skyscraper, 9), (City, 25), (City, 10), (City, 110)]
)
def test_lengths_that_do_not_fit(scenario, entries):
    with pytest.raises(ValidationError, match="entries"):
        scenario(entries=entries)


def test_the_shortest_lists_can_be_drawn():
    for scenario, entries in ((Diary, 8), (Menu, 8), (Skyscraper, 10), (City, 20)):
        rng = random.Random(0)
        for sample in draw(scenario, rng.randrange(100), 300, entries=entries):
            assert all(sample.data[kind] for kind in KINDS)
            assert max(by_entry(sample)) <= entries
