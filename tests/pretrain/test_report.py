"""`python -m pretrain report` on real runs, and on folders that are none."""

import json
import re
from html.parser import HTMLParser

import pytest

import pretrain.__main__ as pretrain
from pretrain.report import curves
from pretrain.run_folder import RunFolder
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    blend = write_corpus(root)
    common = {"train__steps": 4, "validation__every": 2}
    train(blend, root / "muloco", parallel__replicas=2, outer__interval=2, **common)
    train(blend, root / "a<b", optimizer__name="adamw", **common)
    return [root / "muloco", root / "a<b"]


CELLS = ("td", "th", "figcaption")


class Page(HTMLParser):
    """The rows of a page's tables, its figures' titles, and the addresses it points to."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.outside: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag in CELLS:
            self._inside = tag
        if tag == "tr":
            self.rows.append([])
        self.outside += [
            v for k, v in attributes if k in ("src", "href", "xlink:href") and v[0] != "#"
        ]

    def handle_data(self, data):
        if self._inside in ("td", "th") and data.strip():
            self.rows[-1].append(data.strip())
        if self._inside == "figcaption" and data.strip():
            self.titles.append(data)

    def handle_endtag(self, tag):
        if tag in CELLS:
            self._inside = ""


@pytest.fixture(scope="module")
def page(runs):
    output = runs[0].parent / "page.html"
    assert pretrain.main(["report", *map(str, runs), "--output", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8"))


def test_table_holds_what_the_runs_recorded(page, runs):
    rows = {row[0]: row[1:] for row in page.rows}
    last = [lines(run, "validation")[-1]["loss"] for run in runs]
    assert rows["held-out loss, last"] == [f"{loss:.4f}" for loss in last]
    sent = sum(line["bytes_sent"] for line in lines(runs[0], "rounds"))
    assert rows["sent by a replica"] == [f"{sent / 1e6:,.1f} MB", "–"]
    assert rows["optimizer.name"] == ["muon", "adamw"]


def test_every_run_is_a_line_of_each_figure_it_has_records_for(page, runs):
    assert "training loss, nats a token" in page.titles
    assert "cosine between replicas' pseudogradients" in page.titles
    assert "model FLOPs utilisation" not in page.titles  # of no run
    text = (runs[0].parent / "page.html").read_text(encoding="utf-8")
    loss, cosine = (
        text[text.index(title) :].split("</svg>")[0]
        for title in ("training loss", "cosine between replicas")
    )
    colours = [set(re.findall(r"stroke: (#(?:0072b2|d55e00))", svg)) for svg in (loss, cosine)]
    assert [len(found) for found in colours] == [2, 1]


def test_page_needs_nothing_but_itself_and_names_are_no_markup(page, runs):
    assert page.outside == []
    assert str(runs[1]) in page.rows[0]


def test_report_of_one_run_lies_in_its_folder(runs, capfd):
    assert pretrain.main(["report", str(runs[0])]) == 0
    assert capfd.readouterr().out.strip() == str(runs[0] / "report.html")


def test_folder_of_no_run_is_refused(tmp_path, capfd):
    assert pretrain.main(["report", str(tmp_path)]) == 2
    assert "no config.yaml" in capfd.readouterr().err


def test_line_that_is_no_record_is_named(runs, tmp_path, capfd):
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n')
    assert pretrain.main(["report", str(tmp_path)]) == 3
    assert "metrics.jsonl:1" in capfd.readouterr().err


def test_half_a_line_that_a_run_is_writing_is_left_out(runs, tmp_path):
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    text = (runs[0] / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "tok')
    assert pretrain.main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert ["steps", "4 of 4"] in page.rows


def test_tokens_are_those_that_were_trained_on_when_the_batch_changed():
    """A round knows its step alone."""
    tokens = {1: 10, 2: 20, 3: 60, 4: 100}
    metrics = [{"step": step, "tokens": count} for step, count in tokens.items()]
    rounds = [{"step": 2, "drift": 0.1}, {"step": 4, "drift": 0.2}]
    (drift,) = [curve for curve in curves.CURVES if curve.title.startswith("drift")]
    assert curves._series(drift, rounds, metrics) == ([20, 100], [0.1, 0.2])


@pytest.mark.parametrize("count", [0, 1, 2, 3000])
@pytest.mark.parametrize("half", ["", '{"step": 9'])
def test_last_record_is_the_last_whole_line(runs, tmp_path, count, half):
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    records = [{"step": step, "what": "x" * (step % 50)} for step in range(count)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "events.jsonl").write_text(text + half)
    assert RunFolder(tmp_path).last("events") == (records[-1] if records else None)
    assert RunFolder(tmp_path).records("events") == records


def test_last_record_may_be_longer_than_what_is_read_at_first(runs, tmp_path):
    (tmp_path / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    long = {"what": "x" * 100_000}
    (tmp_path / "events.jsonl").write_text('{"step": 1}\n' + json.dumps(long) + "\n")
    assert RunFolder(tmp_path).last("events") == long
