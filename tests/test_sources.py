"""The user's own data: every accepted form gives the same texts and rows, every bad one a line that says where."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketgpt import sources
from pocketgpt.errors import UserError
from pocketgpt.sources import documents, fingerprint, hub_rows, rows, split_documents

ROOT = Path(__file__).parent.parent
TEXTS = ["first", "zweiter\nTag  🎉", "x\ty\0z"]


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)


def lines(items):
    return "".join(json.dumps(item) + "\n" for item in items)


def message(error):
    """The one line that a UserError is."""
    assert "\n" not in str(error.value)
    return str(error.value)


# --- documents ------------------------------------------------------------------------------------------------------


def write_all(folder):
    (folder / "a.jsonl").write_text(lines({"text": text, "id": 1} for text in TEXTS), "utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines({"text": text} for text in TEXTS))
    write_parquet(folder / "c.parquet", {"id": [1, 2, 3], "text": TEXTS})
    (folder / "D.TXT").write_text("plain", "utf-8")


def test_every_form_gives_the_same_documents(tmp_path):
    write_all(tmp_path)
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert list(documents(tmp_path / name)) == TEXTS
    assert list(documents(tmp_path / "D.TXT")) == ["plain"]


def test_a_folder_is_read_in_order_without_what_is_hidden_or_foreign(tmp_path):
    write_all(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "z.txt").write_text("deep")
    (tmp_path / ".hidden").mkdir()
    for name in (".secret.txt", ".hidden/a.txt", "manifest.json", "notes.md", "empty.txt"):
        (tmp_path / name).write_text("" if name == "empty.txt" else "no")
    assert list(documents(tmp_path)) == ["plain", *TEXTS, *TEXTS, *TEXTS, "deep"]


def test_another_field_and_blank_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '\ufeff{"body": "one"}\n\n{"body": ""}\n{"body": " \\n"}\r\n{"body": "two"}', "utf-8"
    )
    assert list(documents(tmp_path / "a.jsonl", "body")) == ["one", "two"]
    write_parquet(tmp_path / "a.parquet", {"body": ["one"], "text": ["two"]})
    assert list(documents(tmp_path / "a.parquet", "body")) == ["one"]


def test_parquet_longer_than_a_batch(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": [str(n) for n in range(2500)]})
    assert list(documents(tmp_path / "a.parquet")) == [str(n) for n in range(2500)]


def test_text_with_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffé one\r\ntwo\r\n".encode())
    assert list(documents(tmp_path / "a.txt")) == ["é one\ntwo\n"]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 16)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("0123456789\nabcdefgh\nij", ["0123456789\n", "abcdefgh\nij"]),  # at line ends
        ("0123\n567 9abcdefghi", ["0123\n", "567 9abcdefghi"]),  # rather than at spaces
        ("01234 6789 abcdefghij", ["01234 6789 ", "abcdefghij"]),  # at spaces when there are none
        ("0123456789abcdefghij", ["0123456789abcde", "fghij"]),  # anywhere when there are none either
        ("éééééééééé", ["ééééééé", "ééé"]),  # never inside a character: 14 bytes and 6
        ("🎉" * 5, ["🎉🎉🎉", "🎉🎉"]),
        ("0123456789abcde", ["0123456789abcde"]),  # shorter than a piece
        ("0123456789abcd\r\nef", ["0123456789abcd\n", "ef"]),
    ],
)
def test_long_text_comes_in_pieces(tmp_path, small_pieces, text, pieces):
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert list(documents(tmp_path / "a.txt")) == pieces


@given(st.text(alphabet="ab \né🎉", max_size=80))
def test_the_pieces_add_up_to_the_text(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", 8)
        pieces = list(sources._text_pieces(path))
    assert "".join(pieces) == text
    assert all(1 <= len(piece.encode()) <= 8 for piece in pieces)


def test_one_line_of_five_megabytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 5_000_000)
    piece = (1 << 20) - 1
    assert [len(text) for text in documents(tmp_path / "a.txt")] == [piece] * 4 + [5_000_000 - 4 * piece]
    (tmp_path / "a.jsonl").write_text(lines([{"text": "x" * 5_000_000}]))
    assert [len(text) for text in documents(tmp_path / "a.jsonl")] == [5_000_000]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"0123\xff", "byte 4 \\(0xff\\)"),
        (b"\xef\xbb\xbf0123\xff", "byte 7 \\(0xff\\)"),
        (b"0123456789\n0123456789\n0123\xc3", "byte 26 \\(0xc3\\)"),
        (b"0123456789abcde\xc3", "byte 15 \\(0xc3\\)"),  # cut off at the very end of a piece
        (b"\x80" * 40, "byte 0 \\(0x80\\)"),
        ("text".encode("utf-16"), "byte 0 \\(0xff\\)"),
    ],
)
def test_bytes_that_are_not_utf8_are_located(tmp_path, small_pieces, content, place):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.txt: {place} is not UTF-8") as error:
        list(documents(tmp_path / "a.txt"))
    message(error)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "x"', r"a\.jsonl:3: not valid JSON: .* at column 13"),
        (b"{oops}", r"a\.jsonl:3: not valid JSON: .* at column 2"),
        (b'"text"', r"a\.jsonl:3: expected an object like \{\.\.\.\}, found str"),
        (b'{"body": "x", "id": 1}', r'a\.jsonl:3: no field "text", found: body, id'),
        (b"{}", r'a\.jsonl:3: no field "text", found: none'),
        (b'{"text": null}', r'a\.jsonl:3: field "text" must be text, found NoneType'),
        (b'{"text": ["x"]}', r'a\.jsonl:3: field "text" must be text, found list'),
        (b'{"text": "\\ud83d"}', r'a\.jsonl:3: field "text" holds half a surrogate pair at character 0'),
        (b'{"text": "\xff"}', r"a\.jsonl:3: byte 10 of the line is not UTF-8"),
        (b"[" * 100_000, r"a\.jsonl:3: not usable JSON"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_bad_rows_are_named_with_file_and_line(tmp_path, line, complaint, compressed):
    content = b'{"text": "fine"}\n\n' + line + b"\n"
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    reader = documents(path)
    assert next(reader) == "fine"
    with pytest.raises(UserError, match=complaint.replace("jsonl:", r"jsonl(?:\.gz)?:")) as error:
        next(reader)
    message(error)


def test_bad_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"id": [1], "body": ["x"]})
    with pytest.raises(UserError, match=r'a\.parquet row 1: no field "text", found: id, body'):
        list(documents(tmp_path / "a.parquet"))
    write_parquet(tmp_path / "a.parquet", {"text": ["x", None]})
    with pytest.raises(UserError, match=r'a\.parquet row 2: field "text" must be text, found NoneType'):
        list(documents(tmp_path / "a.parquet"))
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", b"not parquet at all", whole[: len(whole) // 2]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet: not a readable parquet file") as error:
            list(documents(tmp_path / "a.parquet"))
        message(error)


def test_bad_gzip(tmp_path):
    whole = gzip.compress(lines({"text": str(n)} for n in range(1000)).encode())
    for content in (b"plain text", whole[: len(whole) // 2], whole[:20] + b"\xff" * 20 + whole[40:]):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(
            UserError, match=r"a\.jsonl\.gz(: cannot be read|:\d+: not valid JSON|:\d+: byte \d+)"
        ) as error:
            list(documents(tmp_path / "a.jsonl.gz"))
        message(error)


def test_missing_empty_and_foreign_paths(tmp_path):
    for name, content in (("empty.txt", ""), ("blank.txt", " \n"), ("empty.jsonl", ""), ("bom.txt", "\ufeff")):
        (tmp_path / name).write_text(content, "utf-8")
        with pytest.raises(UserError, match=rf"{name}: there is no text in it"):
            list(documents(tmp_path / name))
    with pytest.raises(UserError, match=r"nowhere: no such file or folder"):
        list(documents(tmp_path / "nowhere"))
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(UserError, match=r"a\.pdf: .* not supported here, only \.txt, \.jsonl, \.jsonl\.gz, \.parquet"):
        list(documents(tmp_path / "a.pdf"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.pdf").write_text("x")
    with pytest.raises(UserError, match=r"folder: no \.txt, \.jsonl, \.jsonl\.gz, \.parquet file in this folder"):
        list(documents(tmp_path / "folder"))


def test_an_unreadable_file_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def refuses(*args):
        raise PermissionError(13, "Permission denied", str(args[0]))

    monkeypatch.setattr("builtins.open", refuses)
    with pytest.raises(UserError, match=r"a\.txt: cannot be read: Permission denied"):
        list(documents(tmp_path / "a.txt"))


def test_the_fingerprint_follows_the_contents(tmp_path):
    write_all(tmp_path)
    first = fingerprint(tmp_path)
    (tmp_path / "notes.md").write_text("ignored")
    os.utime(tmp_path / "D.TXT", (1, 1))
    assert fingerprint(tmp_path) == first
    (tmp_path / "D.TXT").write_text("other")
    assert fingerprint(tmp_path) != first
    assert fingerprint(tmp_path / "a.jsonl") != fingerprint(tmp_path / "b.jsonl.gz")
    with pytest.raises(UserError, match="no such file"):
        fingerprint(tmp_path / "nowhere")


# --- rows -----------------------------------------------------------------------------------------------------------


def test_every_form_gives_the_same_rows(tmp_path):
    items = [{"prompt": "1+1?", "n": [1]}, {"prompt": "é", "n": []}]
    (tmp_path / "a.jsonl").write_text(lines(items))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines(items))
    write_parquet(tmp_path / "c.parquet", {"prompt": ["1+1?", "é"], "n": [[1], []]})
    for name, places in (
        ("a.jsonl", ["a.jsonl:1", "a.jsonl:2"]),
        ("b.jsonl.gz", ["b.jsonl.gz:1", "b.jsonl.gz:2"]),
        ("c.parquet", ["c.parquet row 1", "c.parquet row 2"]),
    ):
        assert list(rows(tmp_path / name)) == [(f"{tmp_path}/{p}", r) for p, r in zip(places, items, strict=True)]
    assert [row for _, row in rows(tmp_path)] == items * 3
    (tmp_path / "d.json").write_text(json.dumps(items))
    assert list(rows(tmp_path / "d.json")) == [(f"{tmp_path}/d.json item {n}", row) for n, row in enumerate(items, 1)]
    (tmp_path / "d.json").write_text("\ufeff" + lines(items))  # as `datasets` writes it
    assert list(rows(tmp_path / "d.json")) == [(f"{tmp_path}/d.json:{n}", row) for n, row in enumerate(items, 1)]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.json", '{\n"a": 1}', "expected an array of objects, found dict"),
        ("a.json", '{"a": 1}\n{"a": }', "a.json:2: not valid JSON"),
        ("a.json", '[{"a": 1}, 2]', "item 2: expected an object"),
        ("a.json", "", "not valid JSON"),
        ("a.json", "[]", "there are no rows in it"),
        ("a.jsonl", "\n", "there are no rows in it"),
        ("a.txt", "text", r"not supported here, only \.jsonl, \.jsonl\.gz, \.parquet, \.json"),
    ],
)
def test_bad_row_files(tmp_path, name, content, complaint):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=complaint) as error:
        list(rows(tmp_path / name))
    message(error)


# --- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path, hub_cache):
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_a_local_folder_goes_through_datasets(folder, streaming, capfd):
    (folder / "train.jsonl").write_text(lines([{"text": "a"}, {"text": "b"}]))
    (folder / "validation.jsonl").write_text(lines([{"text": "c"}]))
    assert list(hub_rows(str(folder), "train", streaming=streaming)) == [
        (f"{folder} train row 1", {"text": "a"}),
        (f"{folder} train row 2", {"text": "b"}),
    ]
    assert [row for _, row in hub_rows(str(folder), "validation", streaming=streaming)] == [{"text": "c"}]
    with pytest.raises(UserError, match=r"split test: .*\['train', 'validation'\]"):
        list(hub_rows(str(folder), "test", streaming=streaming))
    with pytest.raises(UserError, match=r"BuilderConfig 'x' not found"):
        list(hub_rows(str(folder), "train", config="x", streaming=streaming))
    assert capfd.readouterr() == ("", "")


def test_a_local_parquet_folder_and_its_part(folder):
    (folder / "part").mkdir()
    write_parquet(
        folder / "part" / "train.parquet", {"prompt": ["p"], "messages": [[{"role": "user", "content": "x"}]]}
    )
    expected = {"prompt": "p", "messages": [{"role": "user", "content": "x"}]}
    assert [row for _, row in hub_rows(str(folder), "train")] == [expected]
    (folder / "other").mkdir()
    write_parquet(folder / "other" / "train.parquet", {"prompt": ["q"]})
    assert [row for _, row in hub_rows(str(folder), "train", data_dir="part")] == [expected]


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_data_from_the_hub_is_one_line(folder, streaming):
    (folder / "train.jsonl").write_text('{"text": "a"}\n{oops\n')
    with pytest.raises(UserError, match="split train: JSON parse error") as error:
        list(hub_rows(str(folder), "train", streaming=streaming))
    message(error)


def test_datasets_itself_says_nothing(folder):
    (folder / "train.jsonl").write_text('{"text": "a"}\n{oops\n')
    program = (
        "from pocketgpt.errors import run; from pocketgpt.sources import hub_rows\n"
        f"run(lambda: print(list(hub_rows({str(folder)!r}, 'train'))))"
    )
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder.parent / "cache")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: dataset {folder}, split train: JSON parse error")
    assert len(done.stderr.splitlines()) == 1


def test_no_network_is_one_line_at_once(hub_cache, monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    begun = time.perf_counter()
    with pytest.raises(UserError, match=r"cannot reach http://127\.0\.0\.1:9 to load some/name: .*HF_HUB_OFFLINE"):
        next(hub_rows("some/name", "train"))
    assert time.perf_counter() - begun < 3
    assert capfd.readouterr() == ("", "")


def test_a_hanging_network_is_given_up(hub_cache, monkeypatch):
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.2)
    hang = threading.Event()

    def never_in_time(*args, **kwargs):
        hang.wait(60)
        raise TimeoutError

    monkeypatch.setattr(urllib.request, "urlopen", never_in_time)
    begun = time.perf_counter()
    with pytest.raises(UserError, match="cannot reach"):
        next(hub_rows("some/name", "train"))
    assert time.perf_counter() - begun < 3
    hang.set()


@pytest.mark.parametrize("status", [200, 404, 503])
def test_any_answer_is_an_answer(status):
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    assert sources._answers(f"http://127.0.0.1:{server.server_port}")
    server.server_close()


# --- holding out ----------------------------------------------------------------------------------------------------


def split(texts, *args):
    train, val = split_documents(lambda: iter(texts), *args)
    return list(train), list(val)


def test_documents_are_held_out_whole_and_every_time_the_same():
    texts = [f"document {n}" for n in range(1000)]
    train, val = split(texts)
    assert sorted(train + val) == sorted(texts)
    assert 30 <= len(val) <= 70
    assert split(texts) == (train, val)
    assert split(texts, 0.05, 1)[1] != val
    # more data, later, moves nothing
    more = split(texts + [f"new {n}" for n in range(100)])
    assert [text for text in more[1] if not text.startswith("new")] == val


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=3), min_size=20, max_size=60), st.integers(0, 3))
def test_many_documents_are_shared_out(texts, seed):
    train, val = split(texts, 0.05, seed)
    if len(set(texts[:20])) > 1:
        assert sorted(train + val) == sorted(texts)
        assert train and val
        assert not set(train) & set(val)  # copies go the same way


def test_training_gets_a_document_whatever_the_fraction():
    for seed in range(20):
        assert sorted(map(len, split(["first", "second"], 0.999, seed))) == [1, 1]


def test_a_single_document_is_cut_at_a_line_end_near_its_end():
    text = "".join(f"line {n:02}\n" for n in range(100))
    train, val = split([text], 0.05)
    assert train == [text[: 8 * 95]]
    assert val == [text[8 * 95 :]]
    assert split(["a few words in one line"], 0.25) == (["a few words in "], ["one line"])
    assert split(["x" * 100], 0.05) == (["x" * 95], ["x" * 5])
    assert split(["x"], 0.05) == ([], ["x"])


def test_few_documents_give_their_last_parts():
    first, second = ("".join(f"{name} {n:02}\n" for n in range(20)) for name in "ab")
    assert split([first, second], 0.05) == ([first[:-5], second[:-5]], ["a 19\n", "b 19\n"])
    same = "one\ntwo\n"
    assert split([same] * 30, 0.5) == (["one\n"] * 30, ["two\n"] * 30)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_fractions_out_of_range(fraction):
    with pytest.raises(UserError, match="between 0 and 1"):
        split(["a"], fraction)


def test_splitting_streams():
    """Three passes, never a list: only the first twenty documents are looked at ahead."""
    alive = 0

    def docs():
        nonlocal alive
        for n in range(10_000):
            alive += 1
            yield f"document {n}"

    train, _ = split_documents(docs)
    assert alive == 20
    next(train)
    assert alive < 30
