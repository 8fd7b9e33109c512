"""Each mutant can still be planted."""

import pytest

from tests.mutants.table import ROOT, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_mutant_changes_its_symbol_alone(mutant):
    source = (ROOT / mutant.path).read_text()
    assert mutant.plant(source) != source


def test_no_two_have_one_name():
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)


def test_what_they_name_exists():
    for mutant in MUTANTS:
        path, _, name = mutant.found_by.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), mutant.found_by
