"""What a user can do something about is one line and an exit code; what is our fault keeps its traceback."""

import errno
import os

import pytest
import torch

from pocketgpt.errors import UserError, is_out_of_memory, run


def raises(error: BaseException):
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("a.txt:\n bad"), 1, "error: a.txt: bad"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "error: input or output: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "error: /x/y: Permission denied"),
        (MemoryError(), 1, "error: out of memory: take a smaller model or context, or lower train.micro_batch_size"),
        (torch.OutOfMemoryError("CUDA out of memory."), 1, "error: out of memory: take a smaller model or context, "),
    ],
)
def test_one_line_and_a_code(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(raises(error))
    assert end.value.code == code
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1


def test_faults_of_ours_are_not_hidden() -> None:
    for error in (RuntimeError("shape mismatch"), ValueError("x"), KeyError("x")):
        with pytest.raises(type(error)):
            run(raises(error))


def test_memory_that_is_not_there_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 60)
    assert is_out_of_memory(caught.value)
