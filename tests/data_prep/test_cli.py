"""What someone meets who uses the commands for the first time, and what goes wrong then."""

import errno
import io
import os
import shutil
from fractions import Fraction

import pytest
from rich.console import Console, Group

from data_prep import cli, progress, run
from data_prep.plan import Options
from data_prep.progress import Reporter
from data_prep.selection import split_of
from data_prep.streams import ZSTD_MAGIC
from tests.data_prep.helpers import SENTENCEPIECE, command, json_lines, tree, write
from tests.data_prep.kills import killed_at

COMMANDS = sorted(cli._EXAMPLES)
TEXTS = [f"Document {number} of some words." for number in range(40)]


@pytest.fixture
def source(tmp_path):
    write(tmp_path / "in" / "p=a" / "a.jsonl", json_lines(TEXTS))
    return tmp_path / "in"


def tokenize(capsys, source, out, *options):
    fixed = ("--tokenizer", SENTENCEPIECE, "--output", out, "--workers", 1)
    return command(capsys, "tokenize", source, *fixed, *options)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_shows_examples_that_parse(capsys, name):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    examples = shown.partition("examples:")[2].replace("\\\n", " ").strip().splitlines()
    parser, _ = cli._parser()
    for example in examples:
        words = example.partition("#")[0].replace("'", '"').split('"')
        parts = [word for i, w in enumerate(words) for word in ([w] if i % 2 else w.split())]
        assert parts[:3] == ["python", "-m", "data_prep"]
        parser.parse_args(parts[3:])
    assert any(f" {name} " in example for example in examples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokenise", "in"], "argument COMMAND: 'tokenise' is none of"),
        (["tokenise", "in"], "did you mean tokenize?"),
        (["verify", "out", "--jsn"], "did you mean --json?"),
        (["tokenize", "in", "--tokenizer", "t", "--output", "o", "--wrokers", "2"],
         "did you mean --workers? (see python -m data_prep tokenize --help)"),
        (["tokenize", "in", "--tokenizer", "t", "--output", "o", "--bad-records", "skp"],
         "argument --bad-records: 'skp' is none of stop, skip; did you mean skip?"),
        (["tokenize", "in"], "the following arguments are required: --tokenizer, --output"),
        (["download", "l", "--base", "b", "--output", "o", "--pause-seconds", "x"],
         "argument --pause-seconds: 'x' is no number of seconds"),
        (["blend", "out", "--set", "quality=high"],
         "argument --set: 'quality=high' is no PREFIX=SHARE"),
        ([], "the following arguments are required: COMMAND"),
    ],
)  # fmt: skip
def test_a_wrong_word_ends_in_one_line_that_says_what_was_meant(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in printed and printed.startswith("error: ") and printed.count("\n") == 1


@pytest.mark.parametrize("place", ["", "p=a", "p=a/new"])
@pytest.mark.parametrize("name", ["tokenize", "dedup"])
def test_an_output_inside_the_input_is_refused(capsys, source, place, name):
    before = tree(source)
    options = ("--tokenizer", SENTENCEPIECE) if name == "tokenize" else ()
    ended = command(capsys, name, source, "--output", source / place, *options)
    assert (ended.code, "lies inside the input" in ended.err) == (2, True)
    assert tree(source) == before


def test_a_run_that_failed_before_it_finished_anything_leaves_the_folder_free(
    capsys, tmp_path, source
):
    out = tmp_path / "out"
    ended = tokenize(capsys, source, out, "--validation", "0.0001%")
    assert (ended.code, "less than one document" in ended.err) == (2, True)
    assert tokenize(capsys, source, out, "--validation", "20%").code == 0

    out = tmp_path / "bad"
    write(source / "p=a" / "b.jsonl", b"broken\n")
    assert tokenize(capsys, source, out, "--unit-bytes", "1M").code == 3
    write(source / "p=a" / "b.jsonl", json_lines(["repaired"]))
    write(source / "p=a" / "c.jsonl", json_lines(["more"]))
    (finished,) = out.rglob("receipt.json")  # of a.jsonl
    assert tokenize(capsys, source, out, "--validation", "20%").code == 2
    shutil.rmtree(finished.parent)
    assert tokenize(capsys, source, out, "--validation", "20%").code == 0


def test_a_validation_share_that_took_nothing_leaves_the_folder_free(capsys, tmp_path):
    options = Options(validation=Fraction(1, 2))
    trained_on = [text for text in TEXTS if split_of(text, options) == "train"]
    write(tmp_path / "a.jsonl", json_lines(trained_on[:4]))
    ended = tokenize(capsys, tmp_path / "a.jsonl", tmp_path / "out", "--validation", "50%")
    assert (ended.code, "took none of 4 documents; hold out more" in ended.err) == (3, True)
    assert not (tmp_path / "out").exists()


def test_what_happened_to_lie_in_the_folder_stays(capsys, tmp_path, source):
    out = tmp_path / "out"
    write(out / "notes.txt", b"mine")
    whole = write(source / "p=a" / "a.gz", json_lines(TEXTS))
    (source / "p=a" / "a.jsonl").unlink()
    whole.write_bytes(whole.read_bytes()[:-4])
    assert tokenize(capsys, source, out).code == 3
    assert tree(out) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("magic", "file_bytes", "unit_bytes"),
    [
        (b"{", 1 << 20, 4 << 20),
        (b"{", 100 << 20, 4 << 20),
        (b"{", 1 << 30, 64 << 20),
        (b"{", 9 << 30, 128 << 20),
        (ZSTD_MAGIC, 100 << 20, 16 << 20),
    ],
)
def test_one_file_gives_work_to_many_workers(tmp_path, magic, file_bytes, unit_bytes):
    path = tmp_path / "a"
    path.write_bytes(magic)
    os.truncate(path, file_bytes)
    plan = run.plan_without_tokenizer(path, None, Options(unit_bytes=0), tmp_path / "out")
    assert plan.options.unit_bytes == unit_bytes


@pytest.mark.parametrize("name", ["tokenize", "dedup", "merge"])
def test_an_output_that_cannot_be_written_is_named(capsys, tmp_path, source, name):
    taken = write(tmp_path / "taken", b"a file")
    assert tokenize(capsys, source, tmp_path / "done").code == 0
    given, options = (source, ())
    if name == "tokenize":
        options = ("--tokenizer", SENTENCEPIECE)
    if name == "merge":
        given = tmp_path / "done"
    ended = command(capsys, name, given, "--output", taken, *options)
    assert ended.code == 2
    assert f"--output {taken}: cannot be written to (" in ended.err and "Errno" not in ended.err


def test_errors_of_the_system_are_told_without_their_numbers():
    error = OSError(errno.EACCES, os.strerror(errno.EACCES), "data/a.jsonl")
    assert cli._one_line(error) == "data/a.jsonl: permission denied"
    assert cli._one_line(OSError(errno.EIO, "Input/output error")) == "input/output error"
    assert cli._one_line(ValueError("odd")) == "ValueError: odd (--debug shows where)"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_display_shows_its_figures_whatever_the_width(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    reporter = Reporter(console)
    reporter.phase("tokenize", 1000)
    reporter.worker(0, "quality=medium-high/kind=actual/kind2=actual/CC-MAIN-part-00000 [0, 9)")
    reporter.advance(400, 123_456, 7_000_000)
    with console.capture() as captured:
        console.print(Group(*reporter._live.get_renderables()))
    first, figures, worker = captured.get().splitlines()
    assert "tokenize" in first and " 40%" in first and "left" in first
    assert "123,456 documents" in figures and "MB/s" in figures and figures.endswith("tokens/s")
    assert worker.startswith("  worker 0: quality=medium-high")


def test_sizes_and_times_are_in_units_that_people_read():
    assert [progress.in_bytes(size) for size in (7, 12_345, 2.5e9, 10.4e12)] == [
        "7 B", "12.3 kB", "2.5 GB", "10.4 TB",
    ]  # fmt: skip
    times = [progress.duration(seconds) for seconds in (40, 720, 19_200, 3600 * 76)]
    assert times == ["40 s", "12 min", "5 h 20 min", "3 days 4 h"]


@pytest.mark.slow
def test_a_sample_that_was_killed_passes_for_a_whole_one(capsys, tmp_path):
    assert killed_at(8, tmp_path, ["sample", tmp_path / "corpus"])
    assert not (tmp_path / "corpus" / "data-jsonl").exists()
    assert command(capsys, "sample", tmp_path / "corpus").code == 0
    assert len(list((tmp_path / "corpus").rglob("*.zstd"))) == 10
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["data-jsonl"]
