"""What every command does on the console: its log lines and bars, its errors, and what it says at the end.

    --quiet   warnings, errors and the final summary only
    --debug   an error shows its traceback

Log lines go to stdout, errors and bars to stderr. Bars are for terminals: elsewhere everything is plain lines.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from envace.config import ConfigError, load_config, settings_parser
from envace.failures import explained
from envace.settings import Config

CONSOLE_WIDTH = 100
SUMMARY = logging.WARNING + 5  # shown with --quiet, but by one rank only
INTERRUPTED = "interrupted: nothing was saved; SIGTERM saves a checkpoint first"
Found = TypeVar("Found")
logger = logging.getLogger("envace")


def setup_logging(*, quiet: bool = False) -> None:
    """Send the log lines of this package to stdout, as they are. For entry points; calling it again changes nothing."""
    handler = _AboveBars()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if not _shows_bars():
        transformers_logging.disable_progress_bar()  # the hub's too


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="warnings, errors and the final summary only")
    parser.add_argument("--debug", action="store_true", help="an error shows its traceback")


@contextmanager
def command(options: argparse.Namespace, *, interrupted: str = INTERRUPTED) -> Iterator[None]:
    """Around all that an entry point does: a mistake or a failure is one line on stderr and no traceback.

    Exit code 2 for a mistake in the settings, 1 for anything else that the user can put right.
    """
    setup_logging(quiet=options.quiet)
    try:
        yield
    except KeyboardInterrupt:
        if options.debug:
            raise
        sys.exit(interrupted)
    except Exception as error:
        message = explained(error)
        if options.debug or message is None:
            raise
        rank = os.environ.get("RANK", "0")  # torch's launcher says it so
        print(f"error: {message}" if rank == "0" else f"error in process {rank}: {message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def run(
    main: Callable[[Config], Found], description: str, summary: Callable[[Config, Found], dict[str, str]] | None = None
) -> None:
    """An entry point whose command line is settings. summary: what it says at the end, of what `main` returned."""
    parser = settings_parser(description)
    add_options(parser)
    options, unknown = parser.parse_known_intermixed_args()
    with command(options):
        config = load_config(options.config, options.overrides + unknown)
        found = main(config)
        if summary is not None:
            conclude(summary(config, found))


def conclude(lines: dict[str, str]) -> None:
    """The final summary, {what: where}."""
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        logger.log(SUMMARY, "%s  %s", name.ljust(width), value)


def progress(
    work: Collection[Any] | int, label: str, *, enabled: bool = True, only_terminal: bool = False
) -> tqdm[Any]:
    """A progress bar, on a terminal; elsewhere a log line at about every tenth of the work, or nothing.

    work: something of known length to iterate over, or a total that the caller advances with `update(n)`.
    """
    total = work if isinstance(work, int) else len(work)
    bars = _shows_bars()
    settings: dict[str, Any] = {"total": total, "desc": label, "disable": not enabled or (only_terminal and not bars)}
    if bars:
        settings |= {"leave": False, "dynamic_ncols": True}
    else:
        # A forced refresh after maxinterval would add lines of its own.
        settings |= {"miniters": math.ceil(total / 10), "mininterval": 0, "maxinterval": math.inf}
        settings |= {"file": _LogLines(), "bar_format": "{desc} {n_fmt}/{total_fmt}, {remaining} left{postfix}"}
    return tqdm(None if isinstance(work, int) else work, **settings)


def one_line(parts: list[str]) -> str:
    """Joined by two spaces. What does not fit the console is cut between two parts and shows as an ellipsis."""
    line, end = "  ".join(parts), "  ..."
    if len(line) <= CONSOLE_WIDTH:
        return line
    return line[: CONSOLE_WIDTH - len(end) + 2].rsplit("  ", 1)[0] + end


def _is_news(record: logging.LogRecord) -> bool:
    """DeepSpeed warns at import that there is no GPU, also those who train without it."""
    return "Setting accelerator to CPU" not in record.getMessage()


def _shows_bars() -> bool:
    return sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)


class _AboveBars(logging.Handler):
    """Writes to stdout, above a progress bar if one is shown. A stdout that is gone is told once, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
        except OSError as error:  # a closed pipe must not end a training
            print(f"stdout cannot be written ({error.strerror}): log lines are not shown from here on", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except UnicodeError:
            self.handleError(record)


class _LogLines:
    """Stands in for tqdm's terminal: each new state of the bar is a log line."""

    def __init__(self) -> None:
        self.last = ""

    def write(self, text: str) -> None:
        # tqdm redraws with carriage returns and padding, and draws the last state twice.
        if (line := text.strip()) and line != self.last:
            self.last = line
            logger.info(line)

    def flush(self) -> None:
        """Nothing is held back."""
