"""What `--show` and `--help` print is what was configured and declared."""

import pretrain.__main__ as pretrain
from pretrain.config import load
from pretrain.show import help_text, print_table

LISTS = ["resume.allow=[data,tokenizer]", "data.skip=[[3,9]]"]


def test_a_list_is_shown_and_not_taken_for_markup(capfd):
    print_table(load("demo", LISTS))
    rows = {line.split()[0]: line for line in capfd.readouterr().out.splitlines() if line.split()}
    assert "[data, tokenizer]" in rows["resume.allow"]
    assert "[[3, 9]]" in rows["data.skip"]
    assert "[first, first after it] pairs" in rows["data.skip"]


def test_the_line_ends_of_the_source_are_not_those_of_the_help():
    lines = [line.strip() for line in help_text().splitlines()]
    at = lines.index("model.router_balance: a number ≥ 0 (default 0.01)")
    assert lines[at + 1].endswith("imbalance of experts: in each sequence")
    assert lines[at + 2].startswith("experts · Σ (share")


def test_show_needs_neither_data_nor_a_machine_for_it(capfd):
    assert pretrain.main(["15b", "data.blend=not/there.yaml", "--show"]) == 0
    assert "15,2" in capfd.readouterr().out
