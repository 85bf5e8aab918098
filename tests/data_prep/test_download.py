"""Downloads from a real server that breaks off, throttles, and lacks files."""

import fcntl
import gzip
import hashlib
import http.server
import random
import shutil
import threading
from pathlib import Path

import pytest

from data_prep.outputs import read_manifest
from tests.data_prep.helpers import (
    SENTENCEPIECE,
    command,
    documents,
    json_lines,
    small_disk,
    tree,
    write,
)

NAMES = [f"data-jsonl/quality={q}/part-{n}.jsonl.zstd" for q in ("high", "low") for n in (0, 1, 2)]


class Unreliable(http.server.BaseHTTPRequestHandler):
    """Serves `folder`; sends at most `burst` bytes a request, and answers every third with 503."""

    protocol_version = "HTTP/1.1"
    folder: Path
    burst = 1 << 40
    throttled = False
    corrupt = False
    requests = 0

    def do_GET(self):
        kind = type(self)
        kind.requests += 1
        if self.throttled and kind.requests % 3 == 0:
            self.send_error(503)
            return
        path = self.folder / self.path.lstrip("/").replace("%3D", "=")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        asked = self.headers.get("Range")
        if asked and self.headers.get("If-Range") == tag:
            start = int(asked[len("bytes=") : -1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            start = 0
            self.send_response(200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        sent = content[start : start + self.burst]
        self.wfile.write(bytes([sent[0] ^ 1]) + sent[1:] if self.corrupt else sent)
        if len(sent) < len(content) - start:
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    kind = type("Handler", (Unreliable,), {"folder": tmp_path / "server"})
    for place, name in enumerate(NAMES):
        texts = [f"{name} {line} {random.Random(line).random()}" for line in range(40)]
        write(tmp_path / "server" / name, json_lines(texts), [200 * place])
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    kind.address = f"http://127.0.0.1:{serving.server_port}/"
    yield kind
    serving.shutdown()
    serving.server_close()


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "data-jsonl.paths.gz"
    path.write_bytes(gzip.compress("\n".join(NAMES).encode()))
    return path


def download(capsys, listed, server, out, *options):
    fixed = ("--base", server.address, "--output", out, "--pause-seconds", "0.01")
    return command(capsys, "download", listed, *fixed, *options)


def same(one, other):
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in NAMES)


def test_broken_off_and_throttled_files_arrive_whole(capsys, tmp_path, listed, server):
    server.burst, server.throttled = 300, True
    ended = download(capsys, listed, server, tmp_path / "got")
    assert ended.code == 0, ended.err
    assert same(tmp_path / "got", server.folder)
    assert {path.suffix for path in (tmp_path / "got").rglob("*") if path.is_file()} == {".zstd"}


def test_a_part_is_taken_up_and_what_is_there_is_not_fetched_again(
    capsys, tmp_path, listed, server
):
    server.burst = 100
    ended = download(capsys, listed, server, tmp_path / "got", "--attempts", 1)
    assert ended.code == 0, ended.err
    before = server.requests
    assert download(capsys, listed, server, tmp_path / "got").code == 0
    assert server.requests == before


def test_a_file_that_changed_between_two_tries_is_not_pieced_together(
    capsys, tmp_path, listed, server
):
    part = tmp_path / "got" / f"{NAMES[0]}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"older version")
    part.with_name(part.name + ".etag").write_text('"0123"')
    assert download(capsys, listed, server, tmp_path / "got").code == 0
    assert same(tmp_path / "got", server.folder)


def test_files_that_are_missing_on_the_server_are_named(capsys, tmp_path, listed, server):
    (server.folder / NAMES[2]).unlink()
    ended = download(capsys, listed, server, tmp_path / "got")
    assert ended.code == 3
    assert "1 of 6 listed files are not at" in ended.err and NAMES[2] in ended.err


def test_a_corrupted_transfer_is_not_kept(capsys, tmp_path, listed, server):
    server.corrupt = True
    ended = download(capsys, listed, server, tmp_path / "got")
    assert (ended.code, "MD5 differs" in ended.err) == (3, True)
    assert not list((tmp_path / "got").rglob("*.zstd"))


def test_a_server_that_is_down_ends_in_one_line(capsys, tmp_path, listed):
    options = ("--base", "http://127.0.0.1:9/", "--attempts", 2, "--pause-seconds", "0.01")
    ended = command(capsys, "download", listed, "--output", tmp_path / "got", *options)
    assert (ended.code, "gave up after 2 tries" in ended.err) == (3, True)
    assert ended.err.count("\n") == 1


def test_a_disk_that_fills_up_is_taken_for_a_broken_connection(capsys, tmp_path, listed, server):
    """And tried again and again, with ever longer pauses."""
    with small_disk(tmp_path / "disk", "16k"):
        ended = download(capsys, listed, server, tmp_path / "disk" / "got")
        assert ended.code == 1
        assert "got: the disk is full; what is finished is kept" in ended.err
        assert ended.err.count("\n") == 1 and server.requests <= len(NAMES)


def test_two_downloads_at_once_append_to_one_part(capsys, tmp_path, listed, server):
    (tmp_path / "got").mkdir()
    with (tmp_path / "got" / ".download.lock").open("w+") as held:
        held.write("process 7 on elsewhere\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = download(capsys, listed, server, tmp_path / "got")
    assert (ended.code, "process 7 on elsewhere is working here" in ended.err) == (2, True)
    assert server.requests == 0
    assert download(capsys, listed, server, tmp_path / "got").code == 0
    assert not (tmp_path / "got" / ".download.lock").exists()


STREAM = ("--tokenizer", SENTENCEPIECE, "--batch-files", 2, "--workers", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--eod", "<s>"), "tokenizer.eod: was 2, now 1"),
        (("--validation", "10%"), 'options.validation: was "0", now "1/10"'),
        (("--where", "quality=low"), f'files.{NAMES[0]}: was "listed", now absent'),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_stream_into_the_same_folder_takes_over_the_batches_of_the_first(
    capsys, tmp_path, listed, server, options, message, finished
):
    out = tmp_path / "out"
    if not finished:
        (server.folder / NAMES[3]).unlink()
    assert download(capsys, listed, server, out, *STREAM).code == (0 if finished else 3)
    before = tree(out)
    ended = download(capsys, listed, server, out, *STREAM, *options)
    assert (ended.code, message in ended.err) == (2, True), ended.err
    before.pop(".work/lock", None)
    after = tree(out)
    after.pop(".work/lock", None)
    assert after == before


def test_batches_of_another_size_double_or_drop_files(capsys, tmp_path, listed, server):
    out = tmp_path / "out"
    (server.folder / NAMES[3]).rename(tmp_path / "held back")
    assert download(capsys, listed, server, out, *STREAM).code == 3
    ended = download(capsys, listed, server, out, *STREAM, "--batch-files", 3)
    assert (ended.code, "batch_files: was 2, now 3" in ended.err) == (2, True), ended.err
    (tmp_path / "held back").rename(server.folder / NAMES[3])
    assert download(capsys, listed, server, out, *STREAM).code == 0
    assert len(documents(out)) == 240
    assert download(capsys, listed, server, out, *STREAM, "--batch-files", 3).code == 0


def test_two_streams_at_once_fetch_into_one_folder(capsys, tmp_path, listed, server):
    out = tmp_path / "out"
    (out / ".work").mkdir(parents=True)
    with (out / ".work" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = download(capsys, listed, server, out, *STREAM)
    assert (ended.code, "is working here" in ended.err) == (2, True)
    assert server.requests == 0


def test_another_commands_unfinished_work_is_not_thrown_away(capsys, tmp_path, listed, server):
    out = tmp_path / "out"
    write(tmp_path / "in" / "a", json_lines(["one"]))
    write(tmp_path / "in" / "b", b"broken\n")
    begun = ("tokenize", tmp_path / "in", "--tokenizer", SENTENCEPIECE, "--output", out)
    assert command(capsys, *begun, "--workers", 1).code == 3
    before = tree(out)
    assert ".work/units/000000/00000/receipt.json" in before
    done = tmp_path / "done"
    assert command(capsys, *begun[:1], tmp_path / "in" / "a", *begun[2:5], done).code == 0
    for ended in (
        download(capsys, listed, server, out, *STREAM),
        command(capsys, "merge", done, "--output", out),
    ):
        assert (ended.code, "holds .work/plan.json already" in ended.err) == (2, True), ended.err
    assert set(tree(out)) == set(before)


def test_download_tokenise_and_delete_as_one_stream(capsys, tmp_path, listed, server):
    server.burst, server.throttled = 1000, True
    (server.folder / NAMES[5]).rename(tmp_path / "held back")
    ended = download(capsys, listed, server, tmp_path / "out", *STREAM)
    assert ended.code == 3 and NAMES[5] in ended.err  # the first four are done by now
    (tmp_path / "held back").rename(server.folder / NAMES[5])
    shutil.rmtree(server.folder / "data-jsonl" / "quality=high")
    ended = download(capsys, listed, server, tmp_path / "out", *STREAM)
    assert ended.code == 0, ended.err
    assert not list((tmp_path / "out").rglob("*.zstd"))
    assert [row["path"] for row in read_manifest(tmp_path / "out")["inputs"]] == NAMES
    assert command(capsys, "verify", tmp_path / "out").code == 0
    assert len(documents(tmp_path / "out")) == 240
