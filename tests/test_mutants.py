"""The table of planted faults: each has a name, a sentence, and tests that there are."""

import mutants


def test_the_table_says_what_to_plant_and_who_sees_it():
    table = mutants.read(mutants.ROOT / "tests" / "mutants.yaml")
    assert len({mutant.name for mutant in table}) == len(table) >= 60
    assert all(mutant.old != mutant.new and mutant.fault.endswith(".") for mutant in table)
    assert all(mutants.arguments(mutant.tests, mutants.ROOT) for mutant in table)
    package = mutants.ROOT / mutants.PACKAGE
    assert {mutant.name: 1 for mutant in table} == {mutant.name: len(mutant.places(package)) for mutant in table}
