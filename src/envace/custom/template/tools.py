"""What the agent can call: Python functions. Those under `reads` change nothing; `destructive` ones are gated first."""

from envace.custom.tools import PythonTools

from .library import Library

TOOLS = PythonTools(
    lambda world: Library(**world),
    reads=[Library.get_book],
    writes=[Library.lend_book, Library.reserve_book],
)
