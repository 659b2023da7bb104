"""What the agent can call: Python functions. Those under `reads` change nothing; `destructive` ones are gated first."""

from envace.custom.tools import PythonTools

from . import library

TOOLS = PythonTools(
    lambda world: library.Library(**world),
    reads=[library.Library.get_book],
    writes=[library.Library.lend_book, library.Library.reserve_book],
)
