"""For every option of every method, verb and command what must follow it: `test_options_obeyed.py`
runs the table, and asks for a row of each option that is new.
"""

import obeyed_bounds
import obeyed_commands
import obeyed_local
import obeyed_sparse
import obeyed_verbs

TABLES = (obeyed_local, obeyed_sparse, obeyed_bounds, obeyed_verbs, obeyed_commands)
ROWS: dict[str, dict[str, list]] = {k: v for table in TABLES for k, v in table.ROWS.items()}
