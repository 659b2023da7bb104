"""What libraries and the system say when something the user can put right goes wrong, in one line with the remedy.

A UserError says it itself. Here are those that come from elsewhere: memory, disk, other processes. Anything else is a
fault of the program, and its traceback is the message.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from envace.config import ConfigError
from envace.types import UserError, first_line

Phase = Literal["load", "rollout", "update"]

ESTIMATE = "`make doctor` estimates what fits"
KNOBS: dict[Phase, str] = {
    "load": "set model.dtype=bfloat16, train adapters alone with policy.lora.r=16, or divide the model over GPUs with "
    "policy.deepspeed=configs/deepspeed/zero3.json",
    "rollout": "lower rollout.batch_size, rollout.max_context_tokens or rollout.max_new_tokens, or with "
    "policy.deepspeed set policy.rollout_weights=partitioned",
    "update": "lower rl.micro_batch_size (sft.micro_batch_size, policy.pack_tokens) or policy.logprob_chunk, set "
    "policy.gradient_checkpointing=true, or policy.deepspeed=configs/deepspeed/zero3_offload.json",
}
DURING: dict[Phase, str] = {"load": "while the model was loaded", "rollout": "in a rollout", "update": "in an update"}

REMEDIES = {
    errno.ENOSPC: "free some space, or set run_dir to a larger disk",
    errno.EDQUOT: "free some of your quota, or set run_dir to another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or set run_dir to another disk",
    errno.EACCES: "allow it, or set run_dir to a folder that you may write to",
    errno.EPERM: "allow it, or set run_dir to a folder that you may write to",
    errno.EROFS: "set run_dir to a folder that you may write to",
    errno.ENOTDIR: "remove the file that is in the way, or set run_dir to another folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
ONLY_WHEN_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# What gloo says, as a plain RuntimeError that names its source, of a process that is late, and of one that is gone.
# NCCL has a class for it.
FROM_GLOO = "gloo"
LATE_OR_GONE = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Socket closed")
FROM_NCCL = "DistError"


class OutOfMemory(UserError):
    """The message says in which phase, and which settings to change."""


@contextmanager
def in_memory(phase: Phase) -> Iterator[None]:
    """Raises OutOfMemory for what torch raises inside when memory does not suffice. Also a decorator."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory {DURING[phase]} ({_of(error)}): {KNOBS[phase]}; {ESTIMATE}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU torch has a class for it, on a CPU a text."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def explained(error: BaseException) -> str | None:
    """One line: what, where, what to do. None for what the user cannot put right."""
    if isinstance(error, UserError | ConfigError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of memory ({_of(error)}): {ESTIMATE}, and says which settings to change"
    if isinstance(error, OSError) and error.errno in REMEDIES:
        return failed(error, "cannot write" if error.errno in ONLY_WHEN_WRITING else "cannot read or write")
    if is_about_processes(error):
        return (
            f"another process did not answer ({_of(error)}): one hangs or has ended, and its own output says why; "
            "start all of them again, with checkpoint.resume=true"
        )
    return None


def is_about_processes(error: BaseException) -> bool:
    by_class = FROM_NCCL in [kind.__name__ for kind in type(error).__mro__]
    by_gloo = isinstance(error, RuntimeError) and FROM_GLOO in str(error)
    return by_class or by_gloo and any(text in str(error) for text in LATE_OR_GONE)


def failed(error: OSError, what: str, path: object = "a file") -> str:
    """what: failed, such as "cannot write". path: of what, for an error that does not know."""
    remedy = f": {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
    return f"{what} {error.filename or path}: {error.strerror or error}{remedy}"


def _of(error: BaseException) -> str:
    """The first sentences of what a library says, without the place in its own source: the rest is about itself."""
    said = re.sub(r"^\[[^]]*\] (\. )?|err == 0\. ", "", first_line(error))
    return ". ".join(said.split(". ")[:2])[:200].rstrip(".")
