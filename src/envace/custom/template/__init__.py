"""A small library: readers ask where a book is, borrow it, or reserve it while somebody else has it.

Replace it by your own, file by file: library.py is the world, tools.py what the agent can call, tasks.py what users
want and what is right, expert.py who shows it.
"""

from envace.custom.environment import CustomEnvironment

from .expert import expert
from .tasks import make_tasks
from .tools import TOOLS

ENVIRONMENT = CustomEnvironment(TOOLS, make_tasks, expert)
