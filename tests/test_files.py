"""Atomic writing: whole or not at all, and failures told in one line."""

import errno
import fcntl
import hashlib
import json
import os
import signal

import pytest

from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path, fingerprint, reserve, sha256_file, write_json, write_text


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_the_new_file_takes_the_place_of_the_old_one_only_at_the_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_path(path) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, UserError])
def test_after_an_exception_the_old_file_stays_and_nothing_else(tmp_path, exception):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(exception), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise exception("stop")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UserError, match=r"cannot write .*a\.txt: No space left on device"), atomic_path(path) as new:
        new.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_failing_flush_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fails(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(UserError, match="Input/output error"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_the_file_is_flushed_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("flush"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_text(tmp_path / "a.txt", "new")
    assert calls == ["flush", "replace", "flush"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file.a\.txt"):
        write_text(tmp_path / "file" / "a.txt", "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder"):
        write_text(tmp_path / "folder", "text")
    assert names(tmp_path) == ["file", "folder"]


def test_text_and_json_come_back_and_missing_folders_are_made(tmp_path):
    write_text(tmp_path / "deep" / "er" / "a.txt", "héllo\n🎉")
    assert (tmp_path / "deep" / "er" / "a.txt").read_bytes() == "héllo\n🎉".encode()
    write_json(tmp_path / "a.json", {"é": [1, None]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"é": [1, None]}
    assert "é" in text
    assert text.endswith("}\n")


def test_digests(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"abc")
    two.write_bytes(b"")
    assert sha256_file(one) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert fingerprint([one, two]) == hashlib.sha256((sha256_file(one) + sha256_file(two)).encode()).hexdigest()
    assert fingerprint([one, two]) != fingerprint([two, one])
    # where one file ends and the next begins counts
    one.write_bytes(b"ab")
    two.write_bytes(b"c")
    moved = fingerprint([one, two])
    one.write_bytes(b"a")
    two.write_bytes(b"bc")
    assert fingerprint([one, two]) != moved


def test_permissions_are_kept_and_new_files_follow_the_umask(tmp_path):
    path = tmp_path / "a.txt"
    before = os.umask(0o027)
    try:
        write_text(path, "new")
        assert path.stat().st_mode & 0o777 == 0o640
        for mode in (0o600, 0o664, 0o444):
            path.chmod(mode)
            write_text(path, "newer")
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_is_not(tmp_path):
    path, other = tmp_path / "a[1].txt", tmp_path / ".b.txt.12345678.tmp"
    stale = tmp_path / ".a[1].txt.12345678.tmp"
    for left in (stale, other):
        left.write_text("half")
    with atomic_path(path) as living:
        assert not stale.exists()
        living.write_text("first")
        write_text(path, "second")  # another writer of the same file
        assert living.read_text() == "first"
    assert path.read_text() == "first"
    assert names(tmp_path) == [other.name, "a[1].txt"]  # of other files it knows nothing


def test_the_old_file_is_kept_under_its_other_name_once_the_new_one_is_whole(tmp_path):
    path, previous = tmp_path / "a.txt", tmp_path / "a.previous.txt"
    for text in ("1", "2", "3"):
        with atomic_path(path, previous) as temporary:
            temporary.write_text(text)
    with pytest.raises(ValueError), atomic_path(path, previous) as temporary:
        temporary.write_text("4")
        raise ValueError
    assert (path.read_text(), previous.read_text()) == ("3", "2")
    assert names(tmp_path) == ["a.previous.txt", "a.txt"]


def test_a_folder_has_one_process_that_writes(tmp_path):
    folder = tmp_path / "out"
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        reserve(folder)
        os.write(tell, b"x")
        signal.pause()
    try:
        os.read(told, 1)
        with pytest.raises(UserError, match=rf"out: process {child} is writing there: wait for it, or .* with out="):
            reserve(folder)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    reserve(folder)  # the lock died with it
    reserve(tmp_path / "." / "out")  # and is ours as often as we like
    assert (folder / ".lock").read_text() == str(os.getpid())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file: File exists"):
        reserve(tmp_path / "file")


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    reserve(tmp_path)
    assert "cannot be locked (No locks available)" in capsys.readouterr().err
    write_text(tmp_path / "a.txt", "new")
    assert names(tmp_path) == [".lock", "a.txt"]
